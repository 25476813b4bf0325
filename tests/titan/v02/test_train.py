"""What TorchTitan 0.2.2 takes from a user's module, and its own trainer with a recorded config."""

import os
import subprocess
import sys

import pytest
import tomli
import tomli_w
from torchtitan.protocols import train_spec

from mxtrain import ConfigError
from mxtrain.analysis import load_run
from mxtrain.titan.job_config import parse_job_config
from tests.support.forked import ENVIRONMENT
from tests.support.training_worker import free_port


def test_names_that_the_users_own_module_registers_are_known(tmp_path, monkeypatch):
    (tmp_path / "own_models.py").write_text(
        "from torchtitan.protocols.train_spec import get_train_spec, register_train_spec\n"
        'register_train_spec("own", get_train_spec("llama3"))\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(train_spec, "_extra_train_specs", dict(train_spec._extra_train_specs))
    own = ["--experimental.custom_import=own_models"]
    assert parse_job_config([*own, "--model.name=own"]).model.name == "own"
    for flag, message in [
        ("--model.name=llama9", "model.name = 'llama9' is not one of"),
        ("--model.flavor=9B", "model.flavor = '9B' is not one of"),
        ("--model.converters=mxnrom", "model.converters = 'mxnrom' is not one of"),
    ]:
        with pytest.raises(ConfigError, match=message):
            parse_job_config([*own, flag])


@pytest.mark.sweep
def test_a_recorded_config_runs_again_under_torchtitan_alone(command_run, tmp_path):
    resolved = tomli.loads((command_run.folder / "config.toml").read_text())
    resolved["job"]["dump_folder"] = str(tmp_path / "again")
    resolved["metrics"].pop("enable_wandb")
    (tmp_path / "resolved.toml").write_text(tomli_w.dumps(resolved))
    group = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    command = [sys.executable, "-m", "torchtitan.train", f"--job.config_file={tmp_path / 'resolved.toml'}"]
    process = subprocess.run(command, env={**os.environ, **ENVIRONMENT, **group}, capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-4000:]
    again = [row["loss"] for row in load_run(tmp_path / "again").training]
    assert again == [row["loss"] for row in load_run(command_run.folder).training]
    assert "root - INFO - mxnorm mxfp8 p=2, mode reference: " in process.stdout  # TorchTitan's logger
    assert not (tmp_path / "again" / "conversion.txt").exists()
