"""Which checkpoints are whole, and how a checkpoint gets its place and leaves it."""

import pytest

from mxtrain.checkpoints.folder import Checkpoints, clear_leftovers, publish, set_aside, withdraw
from mxtrain.checkpoints.manifest import Manifest, write_manifest
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file


def write(path, step=None, content=b"weights"):
    path.mkdir(parents=True)
    (path / "data").write_bytes(content)
    step = int(path.name.removeprefix("step-")) if step is None else step
    write_manifest(path, Manifest(step, True, {"data": hash_file(path / "data")}))
    return path


def make(folder, *, whole=(), torn=()):
    for step in (*whole, *torn):
        path = write(folder / f"step-{step}")
        if step in torn:
            (path / "data").write_bytes(b"")
    return Checkpoints(folder)


@pytest.mark.parametrize(
    "whole, torn, keep, stale",
    [
        ([5, 10, 15], [], 2, [5]),
        ([5, 10, 100, 15], [], 2, [5, 10]),
        ([5, 10], [], 2, []),
        ([5, 10], [15, 20], 2, []),  # TorchTitan would remove both that are whole
        ([5, 10, 25], [15, 20], 2, [5]),
        ([5], [10, 15, 20], 2, []),
        ([], [5, 10, 15], 2, []),
        ([5, 10, 15], [], 0, []),
        ([0, 5, 10, 15], [], 2, [5]),  # step 0 is where the run starts
        ([0, 5, 10], [], 2, []),
        ([0], [], 1, []),
    ],
)
def test_stale_checkpoints_are_counted_without_damaged_ones(tmp_path, whole, torn, keep, stale):
    saved = make(tmp_path, whole=whole, torn=torn)
    assert saved.stale(keep) == [tmp_path / f"step-{step}" for step in stale]


def test_what_is_wrong_is_named_and_does_not_hide_the_others(tmp_path):
    make(tmp_path, whole=[5], torn=[10])
    (tmp_path / "step-15").mkdir()
    (tmp_path / "step-20").mkdir()
    (tmp_path / "step-20" / ".metadata").touch()
    write(tmp_path / "step-25", step=5)
    write(tmp_path / "step-30")
    (tmp_path / "step-30" / "manifest.json").write_text("[" * 100_000)
    saved = Checkpoints(tmp_path)
    assert list(saved.whole) == [5]
    assert saved.problems.pop("step-20").startswith("it has no manifest.json: TorchTitan itself or an older mxtrain")
    assert saved.problems == {
        "step-10": "data has 0 bytes instead of 7",
        "step-15": "manifest.json is missing",
        "step-25": "it is a copy of step-5",
        "step-30": "manifest.json is not valid JSON: it is nested too deep",
    }
    assert Checkpoints(tmp_path, {"step-5": "bad"}).problems["step-5"] == "bad"
    assert [path.name for path in saved.after(10)] == ["step-15", "step-20", "step-25", "step-30"]


def test_only_folders_named_after_a_step_are_checkpoints(tmp_path):
    for name in ("step-10-mine", "step-010", "step-10.bak", ".saving/step-20", ".removing/step-5", "set_aside/step-30"):
        write(tmp_path / name, step=10)
    assert Checkpoints(tmp_path).found == [] and Checkpoints(tmp_path / "none").found == []
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="file is not a folder"):
        Checkpoints(tmp_path / "file")


def test_a_new_checkpoint_replaces_none(tmp_path):
    publish(write(tmp_path / ".saving" / "step-5", content=b"first"), tmp_path / "step-5")
    with pytest.raises(OSError, match="not empty"):
        publish(write(tmp_path / ".saving" / "step-5", content=b"second"), tmp_path / "step-5")
    assert (tmp_path / "step-5" / "data").read_bytes() == b"first"


def test_nothing_is_removed_from_what_was_set_aside(tmp_path):
    for content in (b"first", b"second", b"third"):
        set_aside(write(tmp_path / "step-5", content=content))
    aside = {path.parent.name: path.read_bytes() for path in (tmp_path / "set_aside").rglob("data")}
    assert aside == {"step-5": b"first", "step-5-2": b"second", "step-5-3": b"third"}


def test_leftovers_of_a_kill_are_removed(tmp_path):
    path = write(tmp_path / "run" / "step-5")
    write(tmp_path / "run" / ".saving" / "step-10")
    for _ in range(2):  # the second time something is in the way
        assert withdraw(path) == tmp_path / "run" / ".removing" / "step-5"
        assert not path.exists()
        write(path)
    kept = set_aside(path)
    clear_leftovers(tmp_path / "run")
    assert [p.name for p in (tmp_path / "run").iterdir()] == ["set_aside"] and kept.is_dir()


def test_nothing_is_removed_behind_a_link(tmp_path):
    other = write(tmp_path / "other" / "step-5", content=b"precious")
    path = write(tmp_path / "run" / "step-5")
    for name in (".saving", ".removing"):
        (tmp_path / "run" / name).symlink_to(other.parent)
    clear_leftovers(tmp_path / "run")
    withdraw(path)
    assert (other / "data").read_bytes() == b"precious"


def test_a_folder_with_nothing_but_leftovers_is_removed(tmp_path):
    write(tmp_path / "run" / ".saving" / "step-10")
    clear_leftovers(tmp_path / "run")
    assert not (tmp_path / "run").exists()
    clear_leftovers(tmp_path / "run")
