"""Metrics in metrics.jsonl, on the terminal and in wandb. tests/titan/test_metrics.py has them under TorchTitan."""

import os
from pathlib import Path
from unittest import mock

import pytest
import wandb

from mxtrain.analysis import loggers, read_metrics
from mxtrain.analysis.loggers import (
    MetricsFileLogger,
    ProgressLogger,
    WandbLogger,
    earlier_wandb_run,
    sync_command,
    wandb_facts,
    wandb_variables,
)

FACTS = {"model": "llama3", "flavor": "125m", "precision": "bfloat16 compute, float32 parameters"}
FACTS |= {"converter": "mxnorm", "converters": ["mxnorm"], "recipe": "mxfp8", "p": 2, "estimator": "pre_round"}


def test_progress_shows_speed_and_the_time_left_from_the_steps_after_the_first(monkeypatch):
    shown, clock = [], iter([100.0, 160.0, 161.0, 201.0])
    monkeypatch.setattr(loggers.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(loggers, "show_line", shown.append)
    progress = ProgressLogger(steps=1000, processes=2)
    row = {"loss_metrics/global_avg_loss": float("nan"), "throughput(tps)": 1234.5}
    progress.log(row, 1)
    progress.log({**row, "grad_norm": 0.12345, "tflops": 1212.3, "mfu(%)": 41.25}, 11)
    progress.log({"validation_metrics/loss": 2.0}, 11)
    progress.log({"loss_metrics/global_avg_loss": 1.0, "throughput(tps)": 10.0}, 1000)
    assert shown == [
        "step    1/1000  loss nan  1,234 tokens/s per device",
        "step   11/1000  loss nan  grad norm 0.123  1,234 tokens/s per device  1:38:54 left  1,212 TFLOP/s per device"
        "  MFU 41.2 %",
        "step   11/1000  validation loss 2.0000",
        "step 1000/1000  loss 1.0000  10 tokens/s per device",
    ]


def test_a_full_disk_is_one_warning_and_training_goes_on(tmp_path, caplog, full_disk):
    path = tmp_path / "run" / "metrics.jsonl"
    path.parent.write_text("a file in place of the folder")
    with_room = MetricsFileLogger(path)
    row = {"loss_metrics/global_avg_loss": 9.0}
    with_room.log(row, 1)
    with_room.log(row, 2)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert warning.startswith(f"step 1: {path} cannot be written: ")
    path.parent.unlink()
    with_room.log(row, 3)
    assert [row["step"] for row in read_metrics(path)] == [1, 2, 3]
    with full_disk(0):
        with_room.log(row, 4)
        with_room.close()
    assert caplog.messages[-1].endswith("cannot be written: File too large; the last rows are lost")


@pytest.fixture(autouse=True)
def no_credentials(monkeypatch, tmp_path):
    for name in list(os.environ):
        if name.startswith("WANDB_") or name == "NETRC" or name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "wandb-config"))
    wandb.teardown()
    yield
    wandb.teardown()  # its settings are global to the process


def build(folder, earlier=None):
    """A logger as TorchTitan builds it, in a process of its own."""
    wandb.teardown()
    job = {"model": {"flavor": "125m"}, "metrics": {}}
    return WandbLogger(lambda: TitansLogger(folder / "tb", job), job, FACTS, earlier)


class TitansLogger:
    """As TorchTitan's own, without importing TorchTitan."""

    def __init__(self, folder, config):
        env = {"project": "PROJECT", "name": "RUN_NAME", "id": "RUN_ID", "group": "RUN_GROUP", "tags": "RUN_TAGS"}
        folder.mkdir(parents=True, exist_ok=True)
        wandb.init(dir=folder, config=config, **{key: os.getenv(f"WANDB_{name}") for key, name in env.items()})

    def log(self, metrics, step):
        wandb.log(metrics, step=step)

    def close(self):
        wandb.finish()


def mode_of(run):
    run.finish()
    return wandb_facts(run, Path(run.dir))["mode"]


def test_a_run_without_a_key_is_offline(monkeypatch, tmp_path):
    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: pytest.fail("asked for a key"))
    monkeypatch.setenv("WANDB_RUN_TAGS", "first,try")
    before = dict(os.environ)
    run = build(tmp_path).run
    assert os.environ == before and mode_of(run) == "offline"
    assert (run.settings.init_timeout, run.settings.finish_timeout, run.settings.silent) == (30, 120, True)
    assert run.tags == ("first", "try"), "words and not letters"


def test_figures_of_all_modules_are_an_overview_and_a_table(tmp_path, monkeypatch):
    one, logged = build(tmp_path), mock.Mock()
    monkeypatch.setattr(one.logger, "log", logged)
    figures = {"a/rms_ratio_min": 0.9, "a/outlier_rows": 0.1, "b/rms_ratio_min": 0.8, "b/outlier_rows": float("nan")}
    figures |= {"a/rms_ratio_mean": 1.1, "b/rms_ratio_mean": 0.7}
    figures |= {"w/fprop_input_sqnr_db": 31.0, "w/dgrad_grad_sqnr_db": 30.0, "e/wgrad_input_sqnr_db_worst_expert": 29.0}
    one.log({f"numerics/{name}": value for name, value in figures.items()}, 50)
    ((shown, step),) = (call.args for call in logged.call_args_list)
    table, worst = shown.pop("numerics/all"), {name.removeprefix("numerics/worst/"): v for name, v in shown.items()}
    assert step == 50 and worst == pytest.approx(
        {"rms_ratio_min": 0.8, "rms_ratio_mean": 0.7, "outlier_rows": float("nan"), "cast_sqnr_db": 29.0}, nan_ok=True
    )
    assert table.columns == ["module", "figure", "value"] and table.data[2] == ["b", "rms_ratio_min", 0.8]
    assert len(table.data) == 9


def test_a_failure_during_the_run_is_one_warning(tmp_path, monkeypatch, caplog):
    one = build(tmp_path)
    for name, error in (("log", ConnectionResetError("Connection lost")), ("close", TimeoutError("Timed out"))):
        monkeypatch.setattr(one.logger, name, mock.Mock(side_effect=error))
    one.log({"lr": 1.0}, 1)
    one.log_event(2, "another recipe")
    one.close()
    assert [record.getMessage() for record in caplog.records if record.name == "root"] == [
        "wandb failed: Connection lost; training goes on, and writes metrics.jsonl"
    ]


def names(run_id=None, facts=FACTS, seed=None, **metrics):
    found = wandb_variables({"metrics": metrics, "debug": {"seed": seed}}, facts, run_id)
    keys = ("PROJECT", "RUN_NAME", "RUN_GROUP", "TAGS", "RUN_ID", "RESUME")
    return [found.get(f"WANDB_{key}") for key in keys]


def test_the_settings_override_the_environment_which_overrides_the_facts(monkeypatch):
    assert names() == ["mxtrain", "llama3 125m mxnorm mxfp8 p=2", *[None] * 4]
    changed = names(facts={**FACTS, "model_args": {"dim": 512, "n_layers": 4}}, seed=0)
    assert changed[1] == "llama3 125m dim=512 n_layers=4 mxnorm mxfp8 p=2 seed 0"
    # A run that continues keeps its names unless the settings say others.
    assert names("abc") == ["mxtrain", None, None, None, "abc", "allow"]
    assert names("abc", wandb_name="new")[1] == "new"
    for key, value in {"PROJECT": "P", "RUN_NAME": "N", "RUN_GROUP": "G", "RUN_TAGS": "c,d"}.items():
        monkeypatch.setenv(f"WANDB_{key}", value)
    assert names()[:4] == ["P", None, None, "c,d"], "wandb reads the others itself"
    metrics = {"wandb_project": "1", "wandb_name": "2", "wandb_group": "3", "wandb_tags": ["4", "5"]}
    assert names(**metrics)[:4] == ["1", "2", "3", "4,5"] and names(wandb_tags=[])[3] is None


def test_the_sync_command_has_all_parts_in_their_order(tmp_path):
    assert earlier_wandb_run(tmp_path) is None
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 8, "validation_loss": 9.0}\n')
    for content, found in (('{"wandb": {"id": "abc"}}', ("abc", 8)), ('{"wandb": null}', None), ("nonsense", None)):
        (tmp_path / "run.json").write_text(content)
        assert earlier_wandb_run(tmp_path) == found
    run = tmp_path / "my run"
    # A second start within a second gets a number, or a folder of the next minute.
    starts = (("3", "1", ""), ("2", "2", ""), ("2", "2", "-1"), *((tb, "3", "") for tb in "45"))
    names = [f"tb/{tb}/wandb/offline-run-2026010{day}_000000-abc{number}" for tb, day, number in starts]
    for name, run_id in [*((name, "abc") for name in names), ("tb/2/wandb/offline-run-20260101_000000-abcd", "abcd")]:
        (run / name).mkdir(parents=True)
        (run / name / f"run-{run_id}.wandb").write_text("")
    places = [f"'{run / name}'" for name in names]
    assert sync_command(run, "abc") == " ".join(["wandb sync", *places])
