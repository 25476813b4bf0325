"""Which checkpoints are complete, and which are stale."""

import pytest

from mxtrain.run_folder.checkpoints import Checkpoints


def make(folder, *, complete=(), parts=()):
    for step in (*complete, *parts):
        (folder / f"step-{step}").mkdir(parents=True)
    for step in complete:
        (folder / f"step-{step}" / ".metadata").write_bytes(b"train_state")
    return Checkpoints(folder)


@pytest.mark.parametrize(
    "complete, parts, keep, stale",
    [
        ([5, 10, 15], [], 2, [5]),
        ([5, 10, 100, 15], [], 2, [5, 10]),
        ([5, 10], [], 2, []),
        ([5, 10], [15, 20], 2, []),  # TorchTitan would remove both that are whole
        ([5, 10, 25], [15, 20], 2, [5]),
        ([5], [10, 15, 20], 2, []),
        ([], [5, 10, 15], 2, []),
        ([5, 10, 15], [], 0, []),
    ],
)
def test_stale_checkpoints_are_counted_without_parts(tmp_path, complete, parts, keep, stale):
    saved = make(tmp_path, complete=complete, parts=parts)
    assert saved.stale(keep) == [tmp_path / f"step-{step}" for step in stale]


def test_a_folder_that_does_not_exist_has_none(tmp_path):
    saved = Checkpoints(tmp_path / "none")
    assert (saved.found, saved.complete, saved.stale(2)) == ([], [], [])


def test_a_copy_beside_the_checkpoints_is_left_alone(tmp_path):
    make(tmp_path, complete=[5, 10, 15])
    (tmp_path / "step-10-mine").mkdir()
    (tmp_path / "step-10-mine" / ".metadata").touch()
    saved = Checkpoints(tmp_path)
    assert saved.misnamed == ["step-10-mine"]
    assert saved.stale(2) == [tmp_path / "step-5"]
