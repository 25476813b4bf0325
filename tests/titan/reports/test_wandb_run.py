import os
import socket
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import wandb
from torchtitan.tools.logging import logger

from mxtrain.settings.sections import Metrics
from mxtrain.titan.reports.wandb_resume import EarlierRun
from mxtrain.titan.reports.wandb_run import WandbLogger, start_run, wandb_facts
from tests.support.wandb_server import wandb_server

KEY = "0123456789abcdef0123456789abcdef01234567"
FACTS = {
    "model": "llama3",
    "flavor": "125m",
    "converter": "mxnorm",
    "converters": ["mxnorm"],
    "recipe": "mxfp8",
    "p": 2,
}
FACTS |= {"estimator": "pre_round", "versions": {"torch": "2.13.0"}}


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
    config = SimpleNamespace(metrics=Metrics(), job=SimpleNamespace(dump_folder=str(folder)))
    config.to_dict = lambda: {"model": {"flavor": "125m"}}
    return WandbLogger(str(folder / "tb"), config, None, facts=FACTS, folder=folder, continued=continued)


def warnings(caplog):
    """What a user sees: wandb has loggers of its own."""
    return [record.getMessage() for record in caplog.records if record.name == logger.name]


def mode_of(run):
    run.finish()
    return wandb_facts(run)["mode"]


def test_without_a_key_a_run_is_offline_and_nobody_is_asked_for_one(monkeypatch, tmp_path):
    monkeypatch.setattr("wandb.errors.term.can_use_terminput", lambda: pytest.fail("asked for a key"))
    assert mode_of(start_run(dir=tmp_path)) == "offline"


def test_a_damaged_key_is_one_warning(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("WANDB_API_KEY", "short")
    assert mode_of(start_run(dir=tmp_path)) == "offline"
    [warning] = warnings(caplog)
    assert warning.startswith("wandb cannot be online: WANDB_API_KEY invalid")


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_users_mode_stands(monkeypatch, tmp_path, server, mode):
    monkeypatch.setenv("WANDB_MODE", mode)
    assert mode_of(start_run(dir=tmp_path)) == mode
    assert server.runs == {}


def test_a_wrong_mode_raises(monkeypatch, tmp_path):
    monkeypatch.setenv("WANDB_MODE", "sideways")
    with pytest.raises(ValueError, match="sideways|mode"):
        start_run(dir=tmp_path)


def test_a_server_that_never_answers_costs_the_time_limit(monkeypatch, tmp_path, caplog):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        monkeypatch.setenv("WANDB_API_KEY", KEY)
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{listener.getsockname()[1]}")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "1")
        start = time.monotonic()
        assert mode_of(start_run(dir=tmp_path)) == "offline"
        assert time.monotonic() - start < 15
    assert "the run is offline" in caplog.text


def test_a_run_whose_first_part_is_not_uploaded_stays_offline(tmp_path, server, monkeypatch):
    assert mode_of(start_run(True, dir=tmp_path)) == "offline"
    monkeypatch.setenv("WANDB_MODE", "online")
    wandb.teardown()
    assert mode_of(start_run(True, dir=tmp_path)) == "online"


def test_timeouts_and_silence_are_the_users_where_given(monkeypatch, tmp_path):
    run = start_run(dir=tmp_path)
    run.finish()
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
    assert wandb_facts(first.run)["url"] == f"{server.url}/someone/p/runs/{first.run.id}"
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

    def fail(*args, **kwargs):
        raise ConnectionResetError("Connection lost")

    for name in ("log", "save", "finish"):
        monkeypatch.setattr(wandb_logger.run, name, fail)
    wandb_logger.log({"lr": 1.0}, 1)
    wandb_logger.log({"lr": 1.0}, 2)
    wandb_logger.close()
    assert warnings(caplog) == ["wandb failed: Connection lost; training goes on, and metrics are in metrics.jsonl"]


def test_an_upload_that_takes_too_long_names_what_is_left(tmp_path, monkeypatch, caplog):
    wandb_logger = build(tmp_path)

    def too_long():
        raise TimeoutError("Timed out finishing run.")

    monkeypatch.setattr(wandb_logger.run, "finish", too_long)
    wandb_logger.close()
    place = Path(wandb_logger.run.dir).resolve().parent
    assert warnings(caplog) == [
        f"wandb's server did not take everything in time; upload the rest with: wandb sync {place}"
    ]


def test_facts_of_no_run():
    assert wandb_facts() == {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}


def test_facts_of_a_run(tmp_path):
    folder = tmp_path / "with space"
    folder.mkdir()
    with wandb.init(mode="offline", dir=folder, settings=wandb.Settings(silent=True)) as run:
        facts = wandb_facts(run)
    assert facts["mode"] == "offline" and facts["url"] is None and facts["id"] == run.id
    assert list((folder / "wandb").glob("offline-run-*")) == [Path(facts["dir"])]
    assert facts["sync"] == f"wandb sync '{facts['dir']}'"
