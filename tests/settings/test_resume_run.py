"""``--resume RUN``; tests/cli/test_bad_run_folders.py has what it refuses."""

import pytest
import tomli_w

from mxtrain.errors import ConfigError
from mxtrain.settings.read import read_settings
from mxtrain.settings.resume_run import resolved, resumed


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run" / "checkpoint" / "step-5").mkdir(parents=True)
    once = {"load_step": 3, "exclude_from_loading": ["dataloader"], "may_change": ["mxnorm.p"]}
    tables = {
        "checkpoint": {"enable": True, "create_seed_checkpoint": True, **once},
        "optimizer": {"lr": 0.5},
        "training": {"steps": 7},
    }
    (tmp_path / "run" / "config.toml").write_text(tomli_w.dumps(tables))
    return tmp_path / "run"


def test_a_run_resumes_with_its_settings_but_not_as_it_last_began(run):
    for words in (["--resume", "run"], ["--resume=run"]):
        arguments = resolved([*words, "--training.steps", "9"])
        settings = read_settings(arguments)
        assert settings.tables() == {
            "job": {"config_file": "run/config.toml", "dump_folder": "run"},
            "optimizer": {"lr": 0.5},
            "training": {"steps": 9},
            "checkpoint": {
                "enable": True,
                "create_seed_checkpoint": False,
                "load_only": False,
                "load_step": -1,
                "exclude_from_loading": [],
                "may_change": [],
            },
        }
    again = read_settings(resolved(["--checkpoint.load_step=5", "--resume", "run"]))
    assert again["checkpoint.load_step"] == 5


def test_a_folder_in_the_users_home(run, monkeypatch):
    monkeypatch.setenv("HOME", str(run.parent))
    config, flags = resumed("~/run", [])
    assert config == str(run / "config.toml") and flags[-1] == f"--job.dump_folder={run}"


def test_other_arguments_stay():
    assert resolved(["--job.config_file=a.toml", "--training.steps", "5"]) == [
        "--job.config_file=a.toml",
        "--training.steps",
        "5",
    ]


def test_help_needs_no_checkpoints(run):
    (run / "checkpoint" / "step-5").rmdir()
    assert resumed("run", ["--help"])[1][-2:] == ["--help", "--job.dump_folder=run"]
    with pytest.raises(ConfigError, match="^checkpoint.interval = 500: run holds no checkpoint to resume from"):
        resumed("run", [])
