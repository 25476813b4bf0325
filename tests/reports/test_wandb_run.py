import json
import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import wandb

from mxtrain.reports.wandb_run import (
    EarlierRun,
    WandbLogger,
    default_names,
    earlier_run,
    start_run,
    sync_command,
    wandb_facts,
    wandb_names,
)
from mxtrain.settings.sections import Metrics
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
    return WandbLogger(folder / "tb", {"model": {"flavor": "125m"}}, Metrics(), FACTS, folder, continued=continued)


def warnings(caplog):
    """What a user sees: wandb has loggers of its own."""
    return [record.getMessage() for record in caplog.records if record.name == "root"]


def mode_of(run):
    run.finish()
    return wandb_facts(run, Path(run.dir))["mode"]


def test_a_damaged_key_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert mode_of(start_run(dir=tmp_path)) == "offline"
    [warning] = warnings(caplog)
    assert warning.startswith("wandb cannot be online: WANDB_API_KEY invalid")


@pytest.mark.parametrize("mode", ["offline", "disabled", "online", None])
def test_the_users_mode_stands(monkeypatch, tmp_path, server, mode):
    """A run whose first part is not uploaded stays offline unless the user wants it online."""
    if mode is not None:
        monkeypatch.setenv("WANDB_MODE", mode)
    assert mode_of(start_run(stays_offline=mode in ("online", None), dir=tmp_path)) == (mode or "offline")
    assert (server.runs == {}) == (mode != "online")


def test_a_server_that_never_answers_costs_the_time_limit(monkeypatch, tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        start = time.monotonic()
        assert mode_of(start_run(dir=tmp_path)) == "offline"
        assert time.monotonic() - start < 15
    assert "the run is offline" in caplog.text


def test_without_a_key_a_run_is_offline_and_timeouts_and_silence_are_the_users_where_given(monkeypatch, tmp_path):
    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: pytest.fail("asked for a key"))
    run = start_run(dir=tmp_path)
    assert mode_of(run) == "offline"
    assert (run.settings.init_timeout, run.settings.finish_timeout, run.settings.silent) == (30, 120, True)
    wandb.teardown()
    for name, value in {"INIT_TIMEOUT": "7", "FINISH_TIMEOUT": "8", "SILENT": "false"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    run = start_run(dir=tmp_path)
    run.finish()
    assert (run.settings.init_timeout, run.settings.finish_timeout, run.settings.silent) == (7, 8, False)


def test_an_online_run_and_its_continuation(tmp_path, server):
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text("[training]\nsteps = 2\n")
    (folder / "conversion.txt").write_text("mxnorm: 2 norms\n")
    (folder / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n{"step": 2, "loss": 8.0}\n')
    first = build(folder)
    for step in (1, 2):
        first.log({"loss_metrics/global_avg_loss": 10.0 - step, "n_tokens_seen": 64.0 * step}, step)
    first.log({"validation_metrics/loss": 9.5}, 3)  # without a row of training, which has the tokens seen
    first.close()
    assert wandb_facts(first.run, folder)["url"] == f"{server.url}/someone/p/runs/{first.run.id}"
    run = server.runs[first.run.id]
    assert (run["displayName"], run["groupName"]) == ("llama3 125m mxnorm mxfp8 p=2", "llama3 125m")
    assert run["tags"] == ["llama3", "125m", "mxnorm", "mxfp8", "p=2"] and run["project"] == "mxtrain"
    assert server.files["mxtrain/config.toml"] == (folder / "config.toml").read_bytes()
    assert server.files["mxtrain/conversion.txt"] == b"mxnorm: 2 norms\n"
    assert server.files["mxtrain/loss.png"].startswith(b"\x89PNG")
    assert server.history[3]["validation_metrics/loss"] == 9.5 and server.history[3]["n_tokens_seen"] == 192

    second = build(folder, EarlierRun(first.run.id, last_step=2))
    assert second.run.id == first.run.id and second.last_step == 3, "a server knows more than the run's folder"
    for step in (3, 4):
        second.log({"loss_metrics/global_avg_loss": 5.0, "n_tokens_seen": 64.0 * step}, step)
    second.close()
    losses = {step: row.get("loss_metrics/global_avg_loss") for step, row in server.history.items()}
    assert losses == {1: 9.0, 2: 8.0, 3: None, 4: 5.0}
    assert set(server.later_names) == {None}, "a name that the user gave it on the server stays"


def test_a_failure_during_the_run_is_one_warning(tmp_path, monkeypatch, caplog):
    wandb_logger = build(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')

    for name in ("log", "save", "finish"):
        lost = ConnectionResetError("Connection lost")
        monkeypatch.setattr(wandb_logger.run, name, mock.Mock(side_effect=lost))
    wandb_logger.log({"lr": 1.0}, 1)
    wandb_logger.log({"lr": 1.0}, 2)
    wandb_logger.close()
    assert warnings(caplog) == ["wandb failed: Connection lost; training goes on, and metrics are in metrics.jsonl"]


def test_an_upload_that_takes_too_long_names_what_is_left(tmp_path, monkeypatch, caplog):
    wandb_logger = build(tmp_path)
    monkeypatch.setattr(wandb_logger.run, "finish", mock.Mock(side_effect=TimeoutError("Timed out finishing run.")))
    wandb_logger.close()
    place = Path(wandb_logger.run.dir).resolve().parent
    message = f"wandb's server did not take everything in time; upload the rest with: wandb sync {place}"
    assert warnings(caplog) == [message]


def names(metrics=None, continues=False, **settings):
    return wandb_names(metrics or Metrics(), FACTS, wandb.Settings(**settings), continues)


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


def test_the_settings_override_the_environment_which_overrides_the_facts(monkeypatch):
    tags = ["llama3", "125m", "mxnorm", "mxfp8", "p=2"]
    own = [None, "mxtrain", "llama3 125m mxnorm mxfp8 p=2", "llama3 125m", tags, None, None]
    assert list(names().values()) == own
    # A run that continues keeps its names unless the settings say others.
    assert [names(continues=True)[key] for key in ("name", "group", "tags")] == [None] * 3
    assert names(Metrics(wandb_name="new"), continues=True)["name"] == "new"
    assert names(SimpleNamespace(log_freq=1))["group"] == "llama3 125m", "without mxtrain's config module"

    theirs = {"project": "p", "run_name": "n", "run_group": "g", "run_tags": ("a", "b")}
    assert list(names(**theirs).values()) == [None, "p", "n", "g", ("a", "b"), None, None], "wandb reads the others"
    own = {"TEAM": "E", "RUN_NAME": "N", "RUN_TAGS": "c, d", "RUN_NOTES": "O", "RUN_JOB_TYPE": "J"}
    for name, value in own.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    assert list(names(**theirs).values()) == ["E", "p", "N", "g", ["c", "d"], "O", "J"]

    metrics = Metrics(wandb_project="1", wandb_name="2", wandb_group="3", wandb_tags=["4"])
    assert list(names(metrics, **theirs).values()) == ["E", "1", "2", "3", ["4"], "O", "J"]
    assert names(Metrics(wandb_tags=[]), **theirs)["tags"] == []


ROWS = '{"step": 1, "loss": 9.0}\n{"step": 8, "loss": 9.0}\n{"step": 8, "validation_loss": 9.0}\n'


@pytest.mark.parametrize(
    "facts, metrics, expected",
    [
        ({"wandb": {"id": "abc"}}, ROWS, EarlierRun("abc", 8)),
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
