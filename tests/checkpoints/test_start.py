"""Where a run starts. tests/cli/test_bad_run_folders.py has the folders in which no run may start."""

import errno
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mxtrain.checkpoints.folder import Manifest, write_manifest
from mxtrain.checkpoints.start import (
    Start,
    find_start,
    interrupted_after,
    latest_checkpoint,
    require_no_other_run,
    resumed_step,
)
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file
from tests.support.releases import Checkpoint

ON = Checkpoint(enable=True)


def save(folder: Path, step: int, full: bool = True) -> Path:
    path = folder / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    (path / "data").write_text(f"{step}")
    write_manifest(path, Manifest(step, full, {"data": hash_file(path / "data")}))
    return path


def test_a_run_resumes_from_the_newest_whole_checkpoint(tmp_path):
    five, ten, nine, twenty = (save(tmp_path, step) for step in (5, 10, 9, 20))
    (nine / "data").unlink()
    (twenty / "data").write_text("")
    thirty = tmp_path / "checkpoint" / "step-30"
    thirty.mkdir()
    start = find_start(tmp_path, ON, 2)
    assert (start.step, start.checkpoint, start.abandoned) == (10, ten, (twenty, thirty))
    assert start.notes == (
        f"resuming after step 10, from {ten}",
        f"{nine} cannot be loaded: data is missing",
        f"{twenty} cannot be loaded: data has 0 bytes instead of 2",
        f"{thirty} cannot be loaded: manifest.json is missing",
        f"checkpoints after step 10 go to {tmp_path / 'checkpoint' / 'set_aside'}: step-20, step-30",
    )
    assert resumed_step(tmp_path, ON) == 10
    assert latest_checkpoint(tmp_path, ON) == ten and five.is_dir() and thirty.is_dir()
    assert latest_checkpoint(tmp_path, Checkpoint()) is None, "a run without checkpoints resumes from none"


def test_an_earlier_step_abandons_the_later_ones_and_says_so(tmp_path):
    paths = [save(tmp_path, step, full=step < 12) for step in (5, 10, 12)]
    start = find_start(tmp_path, Checkpoint(enable=True, load_step=5), 1)
    assert start.step == 5 and start.abandoned == tuple(paths[1:])
    assert start.notes[1:] == (
        f"checkpoints after step 5 go to {tmp_path / 'checkpoint' / 'set_aside'}: step-10, step-12",
    )
    # A run that saves nothing has no reason to move them.
    looks = Checkpoint(enable=True, load_step=5, load_only=True)
    assert find_start(tmp_path, looks, 1).abandoned == ()
    (tmp_path / "metrics.jsonl").write_text("a row")
    with pytest.raises(ConfigError, match=r"would replace \(checkpoint.load_only saves none of its steps\)"):
        find_start(tmp_path, looks, 1)


def test_weights_alone_are_told_from_a_full_checkpoint(tmp_path):
    path = save(tmp_path, 10, full=False)
    with pytest.raises(ConfigError, match="step-10 holds only weights, so no run can resume"):
        find_start(tmp_path, ON, 1)
    (path / "data").unlink()
    with pytest.raises(ConfigError, match="holds no whole checkpoint"):
        find_start(tmp_path, ON, 1)
    (path / "data").write_text("10")
    # Whoever loads only the weights gets them.
    weights = Checkpoint(enable=True, exclude_from_loading=["train_state"])
    start = find_start(tmp_path, replace(weights, load_only=True), 1)
    assert (start.step, start.checkpoint) == (0, path)
    assert start.notes == (f"training starts from the weights in {path}",)
    # Checkpoints of its first steps would be removed as older ones than step 10, from which it would resume.
    with pytest.raises(ConfigError, match="job.dump_folder, and set checkpoint.initial_load_path = '.*step-10'"):
        find_start(tmp_path, weights, 1)


def test_initial_weights_of_another_run(tmp_path):
    path = save(tmp_path / "other", 10)
    settings = Checkpoint(enable=True, initial_load_path=str(path))
    assert find_start(tmp_path, settings, 1).checkpoint == path
    whole = replace(settings, initial_load_model_only=False)
    start = find_start(tmp_path, whole, 1)
    assert (start.step, start.checkpoint) == (10, path)
    assert start.notes == (f"going on after step 10 of another run, from {path}",)
    start = find_start(tmp_path, replace(whole, exclude_from_loading=["train_state"]), 1)
    assert (start.step, start.checkpoint) == (0, path)

    (path / "manifest.json").unlink()
    (path / ".metadata").touch()  # as TorchTitan alone writes it
    start = find_start(tmp_path, settings, 1)
    assert (start.step, start.checkpoint) == (0, None)
    for checkpoint in (path, save(tmp_path / "weights", 10, full=False)):
        with pytest.raises(ConfigError, match="initial_load_model_only = False needs the whole state of a run, and "):
            find_start(tmp_path, replace(whole, initial_load_path=str(checkpoint)), 1)


def test_steps_that_are_done_under_torchtitans_own_trainer(tmp_path):
    """A run that loads no state of the trainer begins at step 1, and its metrics with it."""
    (tmp_path / "metrics.jsonl").write_text("a row")
    (tmp_path / "checkpoint" / "step-3").mkdir(parents=True)
    with pytest.raises(ConfigError, match="holds the metrics of a run"):
        require_no_other_run(tmp_path, ON)
    (tmp_path / "checkpoint" / "step-3" / ".metadata").touch()  # of TorchTitan
    require_no_other_run(tmp_path, ON)
    assert resumed_step(tmp_path, ON) == 3
    save(tmp_path, 5), save(tmp_path, 10)
    assert resumed_step(tmp_path, ON) == 10
    assert resumed_step(tmp_path, replace(ON, load_step=5)) == 5
    assert resumed_step(tmp_path, replace(ON, exclude_from_loading=["train_state"])) == 0
    assert resumed_step(tmp_path, Checkpoint()) == 0


def test_a_new_run_needs_no_words(tmp_path):
    for folder in (tmp_path, tmp_path / "new"):
        for settings in (ON, Checkpoint()):
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


def test_a_start_is_handed_over_as_json(tmp_path):
    start = Start(5, ("a note",), tmp_path / "step-5", (tmp_path / "step-6",), ("a change",))
    for one in (start, Start()):
        assert Start.from_json(json.loads(json.dumps(one.to_json()))) == one


# Runs that may begin again, because a kill came before their first checkpoint.
ENABLED = "[checkpoint]\nenable = true\n"
FIVE = f"{ENABLED}interval = 5\n[training]\nsteps = 20\n"


def write(folder, config, last, saving=False, first=1):
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(first, last + 1)))
    if saving:
        (folder / "checkpoint" / ".saving").mkdir(parents=True)


BEGINS_AGAIN = [
    (FIVE, 5, False, True),  # killed when the first save began
    (FIVE, 7, True, True),  # while an asynchronous save went on
    (FIVE, 7, False, False),  # it has saved, and the checkpoints are gone
    (ENABLED, 499, False, True),
    (ENABLED, 501, False, False),
    (ENABLED + "[training]\nsteps = 100\n", 100, False, False),  # finished
    (ENABLED + "load_only = true\n", 3, False, False),
    ("", 3, False, False),
    ("checkpoint = 3\n", 3, False, False),
]


def test_a_run_begins_again_only_if_nothing_can_have_been_saved(tmp_path):
    for number, (config, last, saving, again) in enumerate(BEGINS_AGAIN):
        folder = tmp_path / str(number)
        folder.mkdir()
        write(folder, config, last, saving)
        assert interrupted_after(folder) == (last if again else None)
        if again:
            assert find_start(folder, ON, 1).step == 0
            require_no_other_run(folder, ON)
        else:
            for look in (find_start, require_no_other_run):
                with pytest.raises(ConfigError, match="holds the metrics of a run"):
                    look(folder, ON, *[1] * (look is find_start))
        with pytest.raises(ConfigError, match="holds the metrics of a run"):
            find_start(folder, Checkpoint(), 1)  # this one would save nothing


def test_a_run_from_a_seed_checkpoint_in_its_folder_begins_again(tmp_path):
    write(tmp_path, FIVE, 3)
    seed = tmp_path / "checkpoint" / "step-0"
    seed.mkdir(parents=True)
    write_manifest(seed, Manifest(0, holds_trainer=False, files={}))
    start = find_start(tmp_path, ON, 1)
    assert (start.step, start.checkpoint) == (0, seed)
    write(tmp_path, FIVE, 7)
    with pytest.raises(ConfigError, match="holds the metrics of a run"):
        find_start(tmp_path, ON, 1)


def test_the_last_row_and_the_first_step_of_the_run_count(tmp_path):
    for last, found in ((10, 10), (11, None)):  # a run from another run's step saves at the next multiple
        write(tmp_path, FIVE, last, first=7)
        assert interrupted_after(tmp_path) == found
    write(tmp_path, FIVE, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert interrupted_after(tmp_path) == 3
    (tmp_path / "metrics.jsonl").write_text("nonsense\nnonsense\n")
    assert interrupted_after(tmp_path) is None
