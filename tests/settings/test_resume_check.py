"""Where the settings of a run so far are read from."""

import json

import pytest

from mxtrain.errors import ConfigError
from mxtrain.run_folder.manifest import Manifest, write_manifest
from mxtrain.settings.read import known_fields
from mxtrain.settings.resume_check import check_resume
from mxtrain.settings.values import Settings

KNOWN = known_fields()


def now(**sections) -> Settings:
    return Settings(KNOWN, {f"{section}.{name}": v for section, table in sections.items() for name, v in table.items()})


@pytest.fixture
def folder(tmp_path):
    """A run of two processes: its checkpoint of step 5, and a config that a later start wrote."""
    checkpoint = tmp_path / "checkpoint" / "step-5"
    checkpoint.mkdir(parents=True)
    write_manifest(checkpoint, Manifest(5, True, {}, settings={"optimizer": {"lr": 0.5}}, processes=2))
    (tmp_path / "config.toml").write_text("[optimizer]\nlr = 0.25\n")
    (tmp_path / "run.json").write_text(json.dumps({"world_size": 4}))
    return tmp_path


SAME = {"training": {"global_batch_size": 16}, "optimizer": {"lr": 0.5}}


def test_the_manifest_of_the_checkpoint_counts(folder):
    assert check_resume(folder, 5, now(**SAME), 1) == []
    assert check_resume(folder, 5, now(optimizer={"lr": 0.5}), 2) == []
    assert check_resume(folder, 5, now(optimizer={"lr": 1.0}), 2) == ["optimizer.lr changes from 0.5 to 1.0 at step 6"]
    with pytest.raises(ConfigError, match=r"^training.global_batch_size = 8 in effect, but .*/checkpoint/step-5 was"):
        check_resume(folder, 5, now(**SAME | {"training": {}}), 1)
    allowed = now(**SAME | {"training": {}, "checkpoint": {"may_change": ["training.global_batch_size"]}})
    assert check_resume(folder, 5, allowed, 1) == ["training.global_batch_size changes from 16 to 8 at step 6"]


def test_without_a_manifest_the_files_of_the_run_count(folder):
    (folder / "checkpoint" / "step-5" / "manifest.json").unlink()
    assert check_resume(folder, 5, now(optimizer={"lr": 0.25}), 4) == []
    with pytest.raises(ConfigError, match="^training.global_batch_size = 8 in effect, but .* was trained with 32"):
        check_resume(folder, 5, now(optimizer={"lr": 0.25}), 1)
    (folder / "run.json").write_text("{")
    assert check_resume(folder, 5, now(optimizer={"lr": 0.25}), 1) == []  # the number of processes is unknown
    (folder / "config.toml").unlink()
    assert check_resume(folder, 5, now(debug={"seed": 1}), 1) == []


def test_a_run_that_starts_is_not_compared(folder):
    assert check_resume(folder, 0, now(debug={"seed": 1}), 3) == []
