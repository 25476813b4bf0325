import json
import logging
import math
import os
import shlex
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torchtitan
import wandb
from torchtitan.components.metrics import DeviceMemStats
from torchtitan.tools import utils
from wandb.proto import wandb_internal_pb2

import mxtrain
from mxtrain.analysis import load_run, read_metrics, summary
from mxtrain.errors import ConfigError
from mxtrain.reports.loggers import MetricsFileLogger
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.metrics import build_metrics_processor, numerics_of, run_facts
from tests.support.releases import only_022, parallel_dims


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


def read_wandb_file(path):
    """Records of an offline run: protocol buffers in LevelDB's log format, after a 7-byte header.

    https://github.com/google/leveldb/blob/main/doc/log_format.md
    """
    data = Path(path).read_bytes()
    assert data[:4] == b":W&B"
    position, parts, records = 7, [], []
    while position < len(data):
        left = 32768 - position % 32768
        if left < 7:  # a record's header does not fit in what is left of the block
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        parts.append(data[position + 7 : position + 7 + length])
        position += 7 + length
        if kind in (1, 4):  # the whole record, or its last part
            records.append(wandb_internal_pb2.Record.FromString(b"".join(parts)))
            parts = []
    assert not parts
    return records


def wandb_file(folder, name="offline-run-*"):
    """History as {step: {key: value}}, config as {key: value}, and the run's own record, of the only run below."""
    wandb.teardown()  # as at the end of the process: its service may still be writing when a run has finished
    [path] = Path(folder).glob(f"**/{name}/*.wandb")
    history, config, run = {}, {}, None
    for record in read_wandb_file(path):
        kind = record.WhichOneof("record_type")
        if kind == "history":
            items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            history[record.history.step.num] = items
        elif kind == "run":
            run = record.run
        if kind in ("run", "config"):
            updates = (record.run.config if kind == "run" else record.config).update
            config.update({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in updates})
    return history, config, run


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
    keys = {"step", "loss", "max_loss", "grad_norm", "lr", "tokens_per_second", "tflops", "memory_gib", "tokens_seen"}
    keys |= {"time", "mfu"} if torch.cuda.is_available() else {"time"}
    assert all(row.keys() == keys for row in rows[:3])
    assert rows[3].keys() == {"step", "validation_loss", "time"} and rows[3]["validation_loss"] == 8.5
    second = rows[1]
    assert (second["loss"], second["max_loss"], second["grad_norm"], second["lr"]) == (8.0, 8.5, 0.5, 5e-4)
    assert second["tokens_seen"] == 4096 and isinstance(second["tokens_seen"], int)
    assert second["tokens_per_second"] > 0 and second["memory_gib"] == 2.0
    assert rows[0]["time"] <= rows[1]["time"] <= rows[2]["time"]
    assert list((tmp_path / "run" / "tb").glob("**/events.out.tfevents.*")), "TensorBoard stays"


@pytest.mark.parametrize(
    "peak, device, known",
    [(989e12, "NVIDIA H100", True), (312e12, "NVIDIA A100-SXM4-40GB", True), (312e12, "NVIDIA RTX", False)],
)
def test_mfu_is_shown_where_the_peak_is_known(tmp_path, monkeypatch, peak, device, known):
    monkeypatch.setattr(utils, "get_peak_flops", lambda name: peak)
    monkeypatch.setattr(utils.device_module, "get_device_name", lambda _: device)
    processor = build(make_config(tmp_path / "run"))
    log_step(processor, 1, 9.0)
    processor.close()
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row.get("mfu") == (pytest.approx(row["tflops"] * 1e14 / peak) if known else None)


@only_022
def test_gradients_that_early_steps_have_used_up_have_no_norm(tmp_path):
    flags = ["--optimizer.early_step_in_backward", "--training.max_norm=inf", "--lr_scheduler.warmup_steps=0"]
    processor = build(make_config(tmp_path / "run", *flags))
    log_step(processor, 1, 9.0)
    processor.close()
    [row] = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["loss"] == 9.0 and "grad_norm" not in row


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


def test_a_loss_that_is_not_finite_is_a_warning_where_no_trainer_of_ours_looks(tmp_path, caplog):
    processor = build(make_config(tmp_path / "run"))
    for step, loss in enumerate([9.0, math.nan, math.inf, 8.0, -math.inf], start=1):
        log_step(processor, step, loss)
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING" and "step" in r.getMessage()] == [
        "step 2: the loss is nan; training goes on",
        "step 5: the loss is -inf; training goes on",
    ]
    processor.close()
    run = load_run(tmp_path / "run")
    assert math.isnan(run.training[1]["loss"]) and run.training[2]["loss"] == math.inf
    assert "loss is NOT FINITE at step 2" in summary(tmp_path / "run")
    caplog.clear()
    mxtrain.set_rounding_step(0)  # as mxtrain's trainer does before it builds the processor
    processor = build(make_config(tmp_path / "watched"))
    log_step(processor, 1, math.nan)
    processor.close()
    assert "the loss is nan" not in caplog.text


def test_a_full_disk_is_one_warning_and_training_goes_on(tmp_path, caplog, full_disk):
    folder = tmp_path / "run"
    folder.write_text("a file in place of the folder")
    with_room = MetricsFileLogger(folder / "metrics.jsonl")
    row = {"loss_metrics/global_avg_loss": 9.0}
    with_room.log(row, 1)
    with_room.log(row, 2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"step 1: {folder / 'metrics.jsonl'} cannot be written: ")
    folder.unlink()
    caplog.set_level(logging.INFO)
    with_room.log(row, 3)
    assert caplog.messages[1:] == [f"step 3: {folder / 'metrics.jsonl'} is complete again"]
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [1, 2, 3]
    with full_disk(0):
        with_room.log(row, 4)
        with_room.close()
    assert caplog.messages[-1].endswith("cannot be written: File too large; the last rows are lost")


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
    assert wandb_file(tmp_path / "all")[1]["converter"] == "none"

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
    assert load_run_variant(tmp_path / "my-run") == "mxnorm mxfp8 p=1"


def load_run_variant(folder):
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    return load_run(folder).variant


def test_wandb_runs_offline_without_a_key(tmp_path, capfd):
    folder = tmp_path / "my-run"
    config = make_config(folder, "--metrics.enable_wandb", "--model.converters=mxnorm", "--mxnorm.p=1")
    processor = build(config)
    losses = [10.0 - step / 7 for step in range(1, 13)]
    for step, loss in enumerate(losses, start=1):
        log_step(processor, step, loss)
    processor.log_validation(loss=8.25, step=12)
    processor.close()

    history, logged_config, run = wandb_file(folder)
    assert (run.project, run.display_name) == ("mxtrain", "llama3 debugmodel mxnorm mxfp8 p=1")
    assert (run.run_group, list(run.tags)) == ("llama3 debugmodel", ["llama3", "debugmodel", "mxnorm", "mxfp8", "p=1"])
    assert [history[step]["loss_metrics/global_avg_loss"] for step in range(1, 13)] == losses
    assert history[12]["validation_metrics/loss"] == 8.25 and history[12]["n_tokens_seen"] == 12 * 2048
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "loss" in row]
    assert len(rows) == len(history) == 12
    for row in rows:
        logged = history[row["step"]]
        assert row["loss"] == logged["loss_metrics/global_avg_loss"]
        assert row["grad_norm"] == logged["grad_norm"] and row["lr"] == logged["lr"]
        assert row["tokens_per_second"] == logged["throughput(tps)"]
        assert row["memory_gib"] == logged["memory/max_reserved(GiB)"]

    facts = json.loads((folder / "run.json").read_text())
    for key in ("converter", "recipe", "p", "estimator", "scale_rounding", "mode", "versions"):
        assert logged_config[key] == facts[key]
    assert logged_config["p"] == 1 and logged_config["versions"]["torchtitan"] == torchtitan.__version__
    assert logged_config["model"]["flavor"] == "debugmodel" and logged_config["mxnorm"]["p"] == 1  # the job config

    assert facts["wandb"]["mode"] == "offline"
    command, verb, directory = shlex.split(facts["wandb"]["sync"])
    assert (command, verb) == ("wandb", "sync") and list(Path(directory).glob("*.wandb"))
    assert facts["wandb"]["sync"] in summary(folder)
    assert "wandb:" not in capfd.readouterr().err  # its own prefix: silent


@pytest.fixture
def resume(tmp_path):
    """Runs that log steps in one folder, which gets a checkpoint of step 2; returns the facts of the last run."""

    def resume(*steps, flags=("--metrics.enable_wandb",)):
        wandb.teardown()  # each start is a process of its own
        processor = build(make_config(tmp_path / "run", *flags, "--checkpoint.enable"))
        for step in steps:
            log_step(processor, step, 10.0 - step)
        processor.close()
        checkpoint = tmp_path / "run" / "checkpoint" / "step-2"
        checkpoint.mkdir(parents=True, exist_ok=True)
        (checkpoint / ".metadata").touch()
        return json.loads((tmp_path / "run" / "run.json").read_text())["wandb"]

    return resume


def test_a_resumed_run_continues_its_wandb_run_unless_the_user_names_another(tmp_path, resume, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    first = resume(1, 2, 3, 4)
    assert resume(flags=())["id"] == first["id"]  # a start without wandb keeps the id
    second = resume(3, 4, 5, 6)
    assert second["id"] == first["id"] and second["dir"] != first["dir"]
    assert "wandb keeps its values of steps 3 to 4; those of this run are in metrics.jsonl" in caplog.messages
    assert "WANDB_RUN_ID" not in os.environ
    assert second["sync"] == f"wandb sync {first['dir']} {second['dir']}"
    assert second["sync"] in summary(tmp_path / "run")
    parts = [wandb_file(Path(facts["dir"]).parent, Path(facts["dir"]).name) for facts in (first, second)]
    assert [list(history) for history, _, _ in parts] == [[1, 2, 3, 4], [5, 6]], "wandb cannot replace steps"
    assert [run.run_id for _, _, run in parts] == [first["id"]] * 2
    assert [run.resume for _, _, run in parts] == [False, True], "so that wandb sync appends"
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    monkeypatch.setenv("WANDB_RUN_ID", "their-id")
    other = resume(3)
    assert other["id"] == "their-id" != first["id"]
    assert list(wandb_file(Path(other["dir"]).parent, "*their-id")[0]) == [3]


def test_two_runs_in_one_process_have_their_own_names_in_the_users_project(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "theirs")
    for p in (1, 2):
        flags = ["--metrics.enable_wandb", "--model.converters=mxnorm", f"--mxnorm.p={p}"]
        build(make_config(tmp_path / str(p), *flags)).close()
        run = wandb_file(tmp_path / str(p))[2]
        assert (run.project, run.display_name) == ("theirs", f"llama3 debugmodel mxnorm mxfp8 p={p}")


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


def test_a_high_precision_run_has_no_numerics():
    facts = run_facts(parse_job_config(["--job.dump_folder=outputs/my-run/", "--model.flavor=debugmodel"]))
    assert (facts["name"], facts["converter"], facts["world_size"]) == ("my-run", "none", 1)
    assert all(facts[key] is None for key in ("recipe", "p", "estimator", "scale_rounding", "mode"))


@pytest.mark.parametrize("converters, every, runs", [(["mxnorm"], 5, True), (["mxnorm"], 0, False), ([], 5, False)])
def test_only_a_run_with_swapped_modules_and_diagnostics_is_measured(converters, every, runs):
    diagnostics = SimpleNamespace(every=every, fqns=None, tokens=64)
    job_config = SimpleNamespace(
        model=SimpleNamespace(converters=converters), mxnorm=SimpleNamespace(diagnostics=diagnostics)
    )
    numerics = numerics_of(job_config, [])
    assert (numerics is not None) == runs
    assert numerics is None or [step for step in range(1, 12) if numerics.is_due(step)] == [5, 10]
