import json
import os
import socket
import time
from pathlib import Path
from unittest import mock

import pytest
import wandb

from mxtrain.reports.wandb_run import (
    WandbLogger,
    default_names,
    earlier_run,
    started,
    sync_command,
    variables,
    wandb_facts,
)
from tests.support.wandb_server import wandb_server

KEY = "0123456789abcdef0123456789abcdef01234567"
FACTS = {"model": "llama3", "flavor": "125m", "precision": "bfloat16 compute, float32 parameters"}
FACTS |= {"converter": "mxnorm", "converters": ["mxnorm"], "recipe": "mxfp8", "p": 2, "estimator": "pre_round"}


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


@pytest.fixture
def server(monkeypatch):
    with wandb_server() as server:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "20")
        yield server


def build(folder, continued=None):
    """A logger as TorchTitan builds it, in a process of its own."""
    wandb.teardown()
    job = {"model": {"flavor": "125m"}, "metrics": {}}
    return WandbLogger(lambda: TitansLogger(folder / "tb", job), job, FACTS, folder, continued)


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


def warnings(caplog):
    """What a user sees: wandb has loggers of its own."""
    return [record.getMessage() for record in caplog.records if record.name == "root"]


def mode_of(run):
    run.finish()
    return wandb_facts(run, Path(run.dir))["mode"]


def test_a_damaged_key_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert mode_of(started(lambda: wandb.init(dir=tmp_path))) == "offline"
    [warning] = warnings(caplog)
    assert warning.startswith("wandb cannot be online: WANDB_API_KEY invalid")


@pytest.mark.parametrize("mode", ["offline", "disabled", "online", None])
def test_the_users_mode_stands(monkeypatch, tmp_path, server, mode):
    """A run whose first part is not uploaded stays offline unless the user wants it online."""
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    assert mode_of(started(lambda: wandb.init(dir=tmp_path), stays_offline=mode in ("online", None))) == (
        mode or "offline"
    )
    assert (server.runs == {}) == (mode != "online")


def test_a_server_that_never_answers_costs_the_time_limit(monkeypatch, tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        monkeypatch.setenv("WANDB_SILENT", "true")  # as by default; otherwise wandb asks the server for the user's name
        start = time.monotonic()
        assert mode_of(started(lambda: wandb.init(dir=tmp_path))) == "offline"
        assert time.monotonic() - start < 15
    assert "the run is offline" in caplog.text


def test_without_a_key_a_run_is_offline_and_timeouts_and_silence_are_the_users_where_given(monkeypatch, tmp_path):
    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: pytest.fail("asked for a key"))
    monkeypatch.setenv("WANDB_SILENT", "false")
    before = dict(os.environ)
    run = build(tmp_path).run
    assert os.environ == before
    assert mode_of(run) == "offline"
    assert (run.settings.init_timeout, run.settings.finish_timeout, run.settings.silent) == (30, 120, False)


def test_an_online_run_and_its_continuation(tmp_path, server):
    folder = tmp_path / "run"
    folder.mkdir()
    first = build(folder)
    for step in (1, 2):
        first.log({"loss_metrics/global_avg_loss": 10.0 - step, "n_tokens_seen": 64.0 * step}, step)
    first.log({"validation_metrics/loss": 9.5}, 3)
    first.close()
    assert wandb_facts(first.run, folder)["url"] == f"{server.url}/someone/p/runs/{first.run.id}"
    run = server.runs[first.run.id]
    assert (run["displayName"], run["groupName"]) == ("llama3 125m mxnorm mxfp8 p=2", "llama3 125m")
    assert run["tags"] == ["llama3", "125m", "mxnorm", "mxfp8", "p=2"] and run["project"] == "mxtrain"
    assert server.history[3]["validation_metrics/loss"] == 9.5

    second = build(folder, (first.run.id, 2))
    assert second.run.id == first.run.id and second.last_step == 3, "a server knows more than the run's folder"
    for step in (3, 4):
        second.log({"loss_metrics/global_avg_loss": 5.0, "n_tokens_seen": 64.0 * step}, step)
    second.close()
    losses = {step: row.get("loss_metrics/global_avg_loss") for step, row in server.history.items()}
    assert losses == {1: 9.0, 2: 8.0, 3: None, 4: 5.0}
    assert set(server.later_names) == {None}, "a name that the user gave it on the server stays"


def test_a_failure_during_the_run_is_one_warning(tmp_path, monkeypatch, caplog):
    wandb_logger = build(tmp_path)
    for name in ("log", "close"):
        lost = ConnectionResetError("Connection lost")
        monkeypatch.setattr(wandb_logger.logger, name, mock.Mock(side_effect=lost))
    wandb_logger.log({"lr": 1.0}, 1)
    wandb_logger.log({"lr": 1.0}, 2)
    wandb_logger.close()
    assert warnings(caplog) == ["wandb failed: Connection lost; training goes on, and metrics are in metrics.jsonl"]


@pytest.mark.parametrize(
    ("facts", "name", "tags"),
    [
        ({}, "mxnorm mxfp8 p=2", ["mxnorm", "mxfp8", "p=2"]),
        ({"estimator": "exact"}, "mxnorm mxfp8 exact", ["mxnorm", "mxfp8", "exact"]),
        ({"converter": "mx_linear", "converters": ["mx_linear"]}, "mx_linear mxfp8", ["mx_linear", "mxfp8"]),
        ({"converter": "none", "converters": []}, "bf16", ["bf16"]),
        ({"recipe": "x" * 99}, f"mxnorm {'x' * 99} p=2", ["mxnorm", "x" * 64, "p=2"]),
    ],
)
def test_names_come_from_what_the_run_trains(facts, name, tags):
    found = default_names({**FACTS, **facts})
    assert found == {"name": f"llama3 125m {name}", "group": "llama3 125m", "tags": ["llama3", "125m", *tags]}


def names(run_id=None, **metrics):
    found = variables(metrics, FACTS, run_id)
    keys = ("PROJECT", "RUN_NAME", "RUN_GROUP", "TAGS", "RUN_ID", "RESUME")
    return [found.get(f"WANDB_{key}") for key in keys]


def test_the_settings_override_the_environment_which_overrides_the_facts(monkeypatch):
    own = ["mxtrain", "llama3 125m mxnorm mxfp8 p=2", "llama3 125m", "llama3,125m,mxnorm,mxfp8,p=2"]
    assert names() == [*own, None, None]
    # A run that continues keeps its names unless the settings say others.
    assert names("abc") == ["mxtrain", None, None, None, "abc", "allow"]
    assert names("abc", wandb_name="new")[1] == "new"
    for key, value in {"PROJECT": "P", "RUN_NAME": "N", "RUN_GROUP": "G", "RUN_TAGS": "c,d"}.items():
        monkeypatch.setenv(f"WANDB_{key}", value)
    assert names()[:4] == ["P", "N", "G", "c,d"]
    metrics = {"wandb_project": "1", "wandb_name": "2", "wandb_group": "3", "wandb_tags": ["4", "5"]}
    assert names(**metrics)[:4] == ["1", "2", "3", "4,5"] and names(wandb_tags=[])[3] is None


def test_the_users_tags_are_words_and_not_letters(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_RUN_TAGS", "first,try")
    run = build(tmp_path).run
    assert run.tags == ("first", "try")
    run.finish()


ROWS = '{"step": 1, "loss": 9.0}\n{"step": 8, "loss": 9.0}\n{"step": 8, "validation_loss": 9.0}\n'


@pytest.mark.parametrize(
    "facts, metrics, expected",
    [
        ({"wandb": {"id": "abc"}}, ROWS, ("abc", 8)),
        ({"wandb": {"id": None}}, ROWS, None),
        ({"wandb": {"mode": "offline"}}, ROWS, None),  # of an older version
        ({"wandb": None}, ROWS, None),
        ({}, ROWS, None),
        ({"wandb": {"id": "abc"}}, "", None),
        ({"wandb": {"id": "abc"}}, "nonsense\n" + ROWS, None),
    ],
)
def test_the_earlier_run_is_in_its_files(tmp_path, facts, metrics, expected):
    assert earlier_run(tmp_path) is None
    (tmp_path / "run.json").write_text(json.dumps(facts))
    (tmp_path / "metrics.jsonl").write_text(metrics)
    assert earlier_run(tmp_path) == expected


def test_the_sync_command_has_the_parts_that_are_not_uploaded_in_their_order(tmp_path):
    assert sync_command(tmp_path, "abc") is None
    run = tmp_path / "my run"
    # A second start within a second gets a number, or a folder of the next minute.
    starts = (("3", "1", ""), ("2", "2", ""), ("2", "2", "-1"), *((tb, "3", "") for tb in "456789"))
    names = [f"tb/{tb}/wandb/offline-run-2026010{day}_000000-abc{number}" for tb, day, number in starts]
    for name, run_id in [*((name, "abc") for name in names), ("tb/2/wandb/offline-run-20260101_000000-abcd", "abcd")]:
        (run / name).mkdir(parents=True)
        (run / name / f"run-{run_id}.wandb").write_text("")
    places = [f"'{run / name}'" for name in names]
    assert sync_command(run, "abc") == " ".join(["wandb sync", *places])
    (run / names[0] / "run-abc.wandb.synced").write_text("")
    assert sync_command(run, "abc") == " ".join(["wandb sync", *places[1:]])
