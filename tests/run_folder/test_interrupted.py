"""Which runs may begin again, because a kill came before their first checkpoint."""

import json

import pytest

from mxtrain.errors import ConfigError
from mxtrain.run_folder.checkpoints import clear_leftovers
from mxtrain.run_folder.interrupted import interrupted_after
from mxtrain.run_folder.manifest import Manifest, write_manifest
from mxtrain.run_folder.start import CheckpointSettings, begin_again, find_start, require_no_other_run

ENABLED = "[checkpoint]\nenable = true\n"
FIVE = f"{ENABLED}interval = 5\n[training]\nsteps = 20\n"


def write(folder, config, last, saving=False, first=1):
    (folder / "config.toml").write_text(config)
    (folder / "metrics.jsonl").write_text("".join(json.dumps({"step": n}) + "\n" for n in range(first, last + 1)))
    if saving:
        (folder / "checkpoint" / ".saving").mkdir(parents=True)


@pytest.mark.parametrize(
    "config, last, saving, begins_again",
    [
        (FIVE, 3, False, True),
        (FIVE, 5, False, True),  # killed when the first save began
        (FIVE, 7, True, True),  # while an asynchronous save went on
        (FIVE, 7, False, False),  # it has saved, and the checkpoints are gone
        (FIVE, 20, False, False),
        (ENABLED, 499, False, True),
        (ENABLED, 501, False, False),
        (ENABLED + "[training]\nsteps = 100\n", 100, False, False),  # finished
        (ENABLED + "[training]\nsteps = 100\n", 100, True, True),  # killed in its last save
        (ENABLED + "load_only = true\n", 3, False, False),
        ("", 3, False, False),
        ("[checkpoint]\nenable =", 3, False, False),
        ("checkpoint = 3\n", 3, False, False),
    ],
)
def test_a_run_begins_again_only_if_nothing_can_have_been_saved(tmp_path, config, last, saving, begins_again):
    write(tmp_path, config, last, saving)
    settings = CheckpointSettings(enable=True)
    if begins_again:
        assert find_start(tmp_path, settings, 1).step == 0
        require_no_other_run(tmp_path, settings)
    else:
        assert begin_again(tmp_path, settings) == () and interrupted_after(tmp_path, tmp_path / "checkpoint") is None
        for look in (lambda: find_start(tmp_path, settings, 1), lambda: require_no_other_run(tmp_path, settings)):
            with pytest.raises(ConfigError, match="holds the metrics of a run"):
                look()
    with pytest.raises(ConfigError, match="holds the metrics of a run"):
        find_start(tmp_path, CheckpointSettings(), 1)  # this one would save nothing


@pytest.mark.parametrize("last, is_interrupted", [(8, True), (10, True), (11, False)])
def test_a_run_that_goes_on_from_another_runs_step_saves_first_at_the_next_multiple(tmp_path, last, is_interrupted):
    write(tmp_path, FIVE, last, first=7)
    assert (interrupted_after(tmp_path, tmp_path / "checkpoint") is not None) == is_interrupted


def test_a_run_from_a_seed_checkpoint_in_its_folder_begins_again(tmp_path):
    write(tmp_path, FIVE, 3)
    seed = tmp_path / "checkpoint" / "step-0"
    seed.mkdir(parents=True)
    write_manifest(seed, Manifest(0, holds_trainer=False, files={}))
    settings = CheckpointSettings(enable=True)
    start = find_start(tmp_path, settings, 1)
    assert (start.step, start.checkpoint) == (0, seed)
    write(tmp_path, FIVE, 7)  # it has saved
    with pytest.raises(ConfigError, match="holds the metrics of a run"):
        find_start(tmp_path, settings, 1)


def test_a_second_kill_before_the_first_row_does_not_matter(tmp_path):
    write(tmp_path, FIVE, 7, saving=True)
    settings, checkpoints = CheckpointSettings(enable=True), tmp_path / "checkpoint"
    linked = (tmp_path / "metrics.jsonl").rename(tmp_path / "linked")
    (tmp_path / "metrics.jsonl").symlink_to(linked)
    (line,) = begin_again(tmp_path, settings)
    assert linked.read_text()
    assert line == "the run in this folder ended near step 7, before its first checkpoint: it begins again"
    clear_leftovers(checkpoints)
    assert find_start(tmp_path, settings, 1).step == 0
    assert interrupted_after(tmp_path, checkpoints) == 0  # so --resume finds a run, too


def test_a_row_that_the_kill_has_cut_does_not_count(tmp_path):
    write(tmp_path, FIVE, 3)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "lo')
    assert interrupted_after(tmp_path, tmp_path / "checkpoint") == 3
    (tmp_path / "metrics.jsonl").write_text("nonsense\nnonsense\n")
    assert interrupted_after(tmp_path, tmp_path / "checkpoint") is None
