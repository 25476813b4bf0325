"""Where a run starts. tests/cli/test_bad_run_folders.py has the folders in which no run may start."""

import errno
import os
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torchtitan.components.checkpoint import CheckpointManager

from mxtrain.errors import ConfigError
from mxtrain.run_folder.checkpoints import mark_incomplete
from mxtrain.run_folder.start import CheckpointSettings, find_start, latest_checkpoint

ON = CheckpointSettings(enable=True)


class TrainState:
    """Saved as TorchTitan saves its trainer."""

    def state_dict(self):
        return {"step": 3}

    def load_state_dict(self, state):
        pass


def save(folder: Path, step: int, full: bool = True) -> Path:
    path = folder / "checkpoint" / f"step-{step}"
    states = {"tok_embeddings.weight": torch.zeros(2), **({"train_state": TrainState()} if full else {})}
    dcp.save(states, checkpoint_id=path, no_dist=True)
    return path


def test_a_run_resumes_from_the_checkpoint_that_torchtitan_picks(tmp_path):
    for step in (5, 10, 9):
        path = save(tmp_path, step)
    (tmp_path / "checkpoint" / "step-30").mkdir()
    start = find_start(tmp_path, ON, 2)
    manager = object.__new__(CheckpointManager)
    manager.enable, manager.folder = False, str(tmp_path / "checkpoint")
    assert start.step == manager._find_load_step() == 10
    assert start.notes == (
        f"resuming after step 10, from {tmp_path / 'checkpoint' / 'step-10'}",
        "incomplete checkpoints are left alone: step-30",
    )
    assert latest_checkpoint(tmp_path, ON) == path.with_name("step-10")


def test_an_earlier_step_leaves_the_later_ones_and_says_so(tmp_path):
    for step in (5, 10, 12):
        save(tmp_path, step, full=step < 12)
    start = find_start(tmp_path, CheckpointSettings(enable=True, load_step=5), 1)
    assert start.step == 5
    assert start.notes[1:] == (
        "later checkpoints stay until they are replaced; a resume takes the latest: step-10, step-12",
    )


def test_weights_alone_are_told_from_a_full_checkpoint(tmp_path):
    save(tmp_path, 10, full=False)
    with pytest.raises(ConfigError, match="step-10 is the end of a run and holds only its weights"):
        find_start(tmp_path, ON, 1)
    # Whoever loads only the weights gets them.
    start = find_start(tmp_path, CheckpointSettings(enable=True, exclude_from_loading=["train_state"]), 1)
    assert start.step == 0 and start.notes == (
        f"training starts from the weights in {tmp_path / 'checkpoint' / 'step-10'}",
    )


def test_a_checkpoint_that_is_being_replaced_is_incomplete(tmp_path):
    save(tmp_path, 5)
    mark_incomplete(save(tmp_path, 10))
    mark_incomplete(tmp_path / "checkpoint" / "step-15")  # there is none
    assert find_start(tmp_path, ON, 1).step == 5


def test_a_new_run_needs_no_words(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        for settings in (ON, CheckpointSettings()):
            assert find_start(folder, settings, 1) == find_start(folder, settings, 8)
            assert find_start(folder, settings, 1).step == 0 and find_start(folder, settings, 1).notes == ()
            assert latest_checkpoint(folder, settings) is None


def test_a_folder_that_cannot_be_read_is_one_line(tmp_path, monkeypatch):
    (tmp_path / "checkpoint").mkdir()

    def iterdir(path):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "iterdir", iterdir)
    with pytest.raises(ConfigError) as error:
        find_start(tmp_path, ON, 1)
    where = tmp_path / "checkpoint"
    assert str(error.value) == f"job.dump_folder = {str(tmp_path)!r} cannot be read: {where}: Permission denied"
