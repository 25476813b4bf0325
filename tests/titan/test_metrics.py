import json
import os
from types import SimpleNamespace

import pytest
import torch
import torchtitan
import wandb
from torchtitan.components.metrics import DeviceMemStats
from torchtitan.tools import utils

import mxtrain
from mxtrain.analysis import read_metrics
from mxtrain.errors import ConfigError
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.metrics import build_metrics_processor, numerics_of, run_facts
from tests.support.releases import parallel_dims
from tests.support.wandb_server import wandb_server


@pytest.fixture(scope="module", autouse=True)
def one_process():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC":
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    wandb.teardown()
    yield
    wandb.teardown()  # its settings are global to the process


def make_config(folder, *flags):
    return parse_job_config([f"--job.dump_folder={folder}", "--metrics.log_freq=1", *flags])


def build(config, **degrees):
    processor = build_metrics_processor(config, parallel_dims(**degrees))
    processor.num_flops_per_token = 1000
    return processor


def log_step(processor, step, loss):
    """As ``torchtitan.train.Trainer.train_step`` does."""
    processor.ntokens_since_last_log += 2048
    processor.data_loading_times.append(0.001)
    extra = {"n_tokens_seen": float(2048 * step), "lr": 1e-3 / step}
    processor.log(step, loss, loss + 0.5, 1.0 / step, extra_metrics=extra)


def test_metrics_file_holds_what_torchtitan_logs(tmp_path, monkeypatch):
    processor = build(make_config(tmp_path / "run", "--metrics.enable_tensorboard"))
    memory = DeviceMemStats(1.0, 10.0, 2.0, 20.0, 0, 0)  # 1 GiB active, 2 reserved: on CPU both are the same number
    monkeypatch.setattr(processor.device_memory_monitor, "get_peak_stats", lambda: memory)
    for step in (1, 2, 3):
        log_step(processor, step, 10.0 - step)
    processor.log_validation(loss=8.5, step=3)
    processor.close()

    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 3]
    keys = {"step", "loss", "max_loss", "grad_norm", "lr", "tokens_per_second", "memory_gib", "tokens_seen", "time"}
    keys |= {"tflops", "mfu"} if torch.cuda.is_available() else set()
    assert all(row.keys() == keys for row in rows[:3])
    assert rows[3].keys() == {"step", "validation_loss", "time"} and rows[3]["validation_loss"] == 8.5
    second = rows[1]
    assert (second["loss"], second["max_loss"], second["grad_norm"], second["lr"]) == (8.0, 8.5, 0.5, 5e-4)
    assert second["tokens_seen"] == 4096 and isinstance(second["tokens_seen"], int)
    assert second["tokens_per_second"] > 0 and second["memory_gib"] == 2.0
    assert rows[0]["time"] <= rows[1]["time"] <= rows[2]["time"]
    assert list((tmp_path / "run" / "tb").glob("**/events.out.tfevents.*")), "TensorBoard stays"


def test_tflops_and_mfu_are_shown_where_the_peak_is_known(tmp_path, monkeypatch):
    for peak, device, known in (
        (989e12, "NVIDIA H100", True),
        (312e12, "NVIDIA A100-SXM4-40GB", True),
        (312e12, "NVIDIA RTX", False),
    ):
        monkeypatch.setattr(utils, "get_peak_flops", lambda name: peak)  # noqa: B023
        monkeypatch.setattr(utils.device_module, "get_device_name", lambda _: device)  # noqa: B023
        processor = build(make_config(tmp_path / device))
        log_step(processor, 1, 9.0)
        processor.close()
        [row] = read_metrics(tmp_path / device / "metrics.jsonl")
        assert ("tflops" in row) == known
        assert row.get("mfu") == (pytest.approx(row["tflops"] * 1e14 / peak) if known else None)


def test_resumed_run_continues_the_file(tmp_path):
    checkpoint = tmp_path / "run" / "checkpoint" / "step-2"
    for steps, flags in (((1, 2, 3, 4), []), ((3, 4, 5), ["--checkpoint.enable"])):
        processor = build(make_config(tmp_path / "run", *flags))
        for step in steps:
            log_step(processor, step, float(steps[0]))
        processor.close()
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / ".metadata").touch()
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 1.0), (2, 1.0), (3, 3.0), (4, 3.0), (5, 3.0)]


def test_a_run_that_would_replace_metrics_is_refused_by_every_trainer(tmp_path):
    processor = build(make_config(tmp_path / "run"))
    log_step(processor, 1, 9.0)
    processor.close()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(ConfigError, match="holds the metrics of a run"):
        build(make_config(tmp_path / "run"))
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def test_a_run_starts_without_run_json(tmp_path, caplog):
    (tmp_path / "run" / "run.json").mkdir(parents=True)  # cannot be written
    processor = build(make_config(tmp_path / "run"))
    log_step(processor, 1, 9.0)
    processor.close()
    warning = f"{tmp_path / 'run' / 'run.json'} cannot be written: Is a directory; training goes on without it"
    assert warning in caplog.messages
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 1


def test_only_the_metrics_rank_writes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    processor = build(make_config(tmp_path / "run"))
    log_step(processor, 1, 9.0)
    processor.close()
    assert not (tmp_path / "run").exists()

    # All ranks may have a wandb run each; these two files stay with one.
    build(make_config(tmp_path / "all", "--metrics.enable_wandb", "--metrics.save_for_all_ranks")).close()
    assert [path.name for path in (tmp_path / "all").iterdir()] == ["tb"]
    assert list((tmp_path / "all").glob("tb/*/rank_1/wandb/offline-run-*"))

    # Also with two pipeline stages, all of which know the loss: rank 1 writes nothing.
    build(make_config(tmp_path / "stages"), pp=2).close()
    assert not (tmp_path / "stages").exists()


def test_run_facts(tmp_path):
    config = make_config(tmp_path / "my-run", "--model.converters=mxnorm", "--mxnorm.p=1")
    build(config).close()
    facts = json.loads((tmp_path / "my-run" / "run.json").read_text())
    assert facts.pop("wandb") == {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}
    assert facts == run_facts(config)
    assert (facts["name"], facts["model"], facts["flavor"]) == ("my-run", "llama3", "debugmodel")
    assert (facts["converters"], facts["converter"], facts["recipe"], facts["p"]) == (["mxnorm"], "mxnorm", "mxfp8", 1)
    assert (facts["estimator"], facts["scale_rounding"]) == ("pre_round", "rceil")
    assert facts["mode"] in ("native", "emulated", "reference")
    assert facts["versions"].keys() == {"mxtrain", "python", "torch", "torchtitan", "torchao", "triton"}
    assert facts["versions"]["mxtrain"] == mxtrain.__version__
    assert facts["versions"]["torchtitan"] == torchtitan.__version__
    assert facts["precision"] == "bfloat16 compute, float32 parameters"
    assert facts["device"] and facts["world_size"] == 1
    facts = run_facts(parse_job_config(["--job.dump_folder=outputs/my-run/", "--model.flavor=debugmodel"]))
    assert (facts["name"], facts["converter"], facts["world_size"]) == ("my-run", "none", 1)
    assert all(facts[key] is None for key in ("recipe", "p", "estimator", "scale_rounding", "mode"))


def wandb_run(folder, *steps, flags=("--metrics.enable_wandb",)) -> dict:
    """Log steps in a process of its own, save a checkpoint of step 2, and return the facts about wandb."""
    wandb.teardown()
    processor = build(make_config(folder, *flags, "--checkpoint.enable", "--model.converters=mxnorm", "--mxnorm.p=1"))
    for step in steps:
        log_step(processor, step, 10.0 - step)
    processor.close()
    checkpoint = folder / "checkpoint" / "step-2"
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / ".metadata").touch()
    return json.loads((folder / "run.json").read_text())["wandb"]


def test_wandb_has_what_torchtitan_logs_and_a_resumed_run_continues_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123456789abcdef01234567")
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        first = wandb_run(folder, 1, 2, 3)
        assert (first["mode"], first["url"]) == ("online", f"{server.url}/someone/p/runs/{first['id']}")
        assert server.runs[first["id"]]["displayName"] == "llama3 debugmodel mxnorm mxfp8 p=1"
        rows = read_metrics(folder / "metrics.jsonl")
        names = {"loss": "loss_metrics/global_avg_loss", "memory_gib": "memory/max_reserved(GiB)", "lr": "lr"}
        names |= {"tokens_per_second": "throughput(tps)", "tokens_seen": "n_tokens_seen", "grad_norm": "grad_norm"}
        for row in rows:
            assert {name: row[name] for name in names} == {n: server.history[row["step"]][k] for n, k in names.items()}
        facts = json.loads((folder / "run.json").read_text())
        assert all(server.config[key] == facts[key] for key in ("converter", "recipe", "p", "mode", "versions"))
        assert server.config["model"]["flavor"] == "debugmodel"  # the job config
        assert wandb_run(folder, flags=())["id"] == first["id"], "a start without wandb keeps the id"
        assert wandb_run(folder, 3, 4)["id"] == first["id"] and "WANDB_RUN_ID" not in os.environ
        assert set(server.later_names) == {None}, "a name that the user gave it on the server stays"
        assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3, 4] == [*server.history]
        monkeypatch.setenv("WANDB_RUN_ID", "their-id")
        assert wandb_run(folder, 3)["id"] == "their-id"


def test_wandb_is_untouched_when_disabled(tmp_path, monkeypatch):
    monkeypatch.setattr(wandb, "init", lambda **kwargs: pytest.fail("wandb was started"))
    build(make_config(tmp_path / "run")).close()
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    build(make_config(tmp_path / "run", "--metrics.enable_wandb")).close()


def test_training_goes_on_when_wandb_cannot_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_MODE", "sideways")
    processor = build(make_config(tmp_path / "run", "--metrics.enable_wandb"))
    for step in (1, 2):
        log_step(processor, step, 9.0)
    processor.close()
    warnings = [record.getMessage() for record in caplog.records if "wandb did not start" in record.getMessage()]
    assert len(warnings) == 1
    assert json.loads((tmp_path / "run" / "run.json").read_text())["wandb"]["mode"] == "disabled"
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.parametrize("converters, every, runs", [(["mxnorm"], 5, True), (["mxnorm"], 0, False), ([], 5, False)])
def test_only_a_run_with_swapped_modules_and_diagnostics_is_measured(converters, every, runs):
    diagnostics = SimpleNamespace(every=every, fqns=None, tokens=64)
    job_config = SimpleNamespace(
        model=SimpleNamespace(converters=converters), mxnorm=SimpleNamespace(diagnostics=diagnostics)
    )
    numerics = numerics_of(job_config, [])
    assert (numerics is not None) == runs
    assert numerics is None or [step for step in range(1, 12) if numerics.is_due(step)] == [5, 10]
