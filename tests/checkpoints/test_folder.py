"""Manifests and the damage that they show, which checkpoints are whole, and how one gets its place and leaves it."""

import json
from dataclasses import asdict
from hashlib import sha256

import pytest

from mxtrain.checkpoints import folder as module
from mxtrain.checkpoints.folder import (
    MANIFEST_FILE,
    Checkpoints,
    DamagedCheckpoint,
    Manifest,
    check_hashes,
    check_sizes,
    clear_leftovers,
    file_record,
    publish,
    read_manifest,
    set_aside,
    withdraw,
    write_manifest,
)
from mxtrain.files import FileRecord, hash_file

LARGE = bytes(range(256)) * 40_000  # larger than a piece that is read at a time


def write(path, step=None, content=b"weights", with_hash=True):
    path.mkdir(parents=True)
    (path / "data").write_bytes(content)
    step = int(path.name.removeprefix("step-")) if step is None else step
    write_manifest(path, Manifest(step, True, {"data": file_record(path / "data", with_hash)}))
    return path


def test_a_manifest_reads_back_as_written(tmp_path):
    (tmp_path / "data").write_bytes(LARGE)
    settings = {"optimizer": {"lr": 1e-3}, "model": {"converters": ["mxnorm"]}}
    record = FileRecord(len(LARGE), sha256(LARGE).hexdigest())
    manifest = Manifest(7, True, {"data": record}, settings, {"torch": None}, 2, {"mxnorm.p": 2})
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest and hash_file(tmp_path / "data") == record


def test_a_manifest_of_a_newer_version_is_named(tmp_path):
    content = {"format": 3, **asdict(Manifest(7, True, {}))}
    (tmp_path / MANIFEST_FILE).write_text(json.dumps({**content, "sha256": module._own_hash(content)}))
    with pytest.raises(DamagedCheckpoint, match="has format 3, and this version reads 2$"):
        read_manifest(tmp_path)


def remove(path):
    path.unlink()


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def as_folder(path):
    path.unlink()
    path.mkdir()


def other_step(path):
    path.write_text(path.read_text().replace('"step": 7', '"step": 8'))


DAMAGE = [
    (remove, "data", "data is missing"),
    (shorten, "data", "data has 10,239,999 bytes instead of 10,240,000"),
    (flip, "data", "data has other content than was saved"),
    (remove, MANIFEST_FILE, "manifest.json is missing"),
    (shorten, MANIFEST_FILE, "manifest.json is not valid JSON: "),
    (as_folder, MANIFEST_FILE, "manifest.json cannot be read: Is a directory"),
    (other_step, MANIFEST_FILE, "manifest.json is damaged"),
]


def test_damage_is_named(tmp_path):
    for number, (damage, name, problem) in enumerate(DAMAGE):
        path = write(tmp_path / f"{number}", step=7, content=LARGE)
        damage(path / name)
        with pytest.raises(DamagedCheckpoint) as error:
            manifest = read_manifest(path)
            check_sizes(path, manifest)
            check_hashes(path, manifest, manifest.files)
        assert str(error.value).startswith(problem)


def test_a_file_without_a_hash_is_not_read(tmp_path):
    path = write(tmp_path / "step-5", with_hash=False)
    flip(path / "data")
    manifest = Checkpoints(tmp_path).whole[5]
    assert manifest.files == {"data": FileRecord(7, None)}
    check_hashes(path, manifest, manifest.files)


@pytest.mark.parametrize(
    "whole, torn, keep, stale",
    [
        ([5, 10, 100, 15], [], 2, [5, 10]),
        ([5, 10], [15, 20], 2, []),  # TorchTitan would remove both that are whole
        ([5, 10, 25], [15, 20], 2, [5]),
        ([5, 10, 15], [], 0, []),
        ([0, 5, 10, 15], [], 2, [5]),  # step 0 is where the run starts
    ],
)
def test_stale_checkpoints_are_counted_without_damaged_ones(tmp_path, whole, torn, keep, stale):
    for step in (*whole, *torn):
        path = write(tmp_path / f"step-{step}")
        if step in torn:
            (path / "data").write_bytes(b"")
    assert Checkpoints(tmp_path).stale(keep) == [tmp_path / f"step-{step}" for step in stale]


def test_what_is_wrong_is_named_and_does_not_hide_the_others(tmp_path):
    write(tmp_path / "step-5")
    shorten(write(tmp_path / "step-10") / "data")
    (tmp_path / "step-20").mkdir()
    for name in ("step-10-mine", "step-010", ".saving/step-20", "set_aside/step-30"):
        write(tmp_path / name, step=10)
    saved = Checkpoints(tmp_path)
    assert list(saved.whole) == [5] and saved.newest == tmp_path / "step-5"
    assert saved.problems == {"step-10": "data has 6 bytes instead of 7", "step-20": "manifest.json is missing"}
    assert [path.name for path in saved.after(10)] == ["step-20"]
    assert Checkpoints(tmp_path / "none").found == [] and Checkpoints(tmp_path / "none").newest is None
    with pytest.raises(NotADirectoryError):
        Checkpoints(tmp_path / "step-5" / "data")


def test_a_new_checkpoint_replaces_none_and_nothing_is_removed_from_what_was_set_aside(tmp_path):
    publish(write(tmp_path / ".saving" / "step-5", content=b"first"), tmp_path / "step-5")
    with pytest.raises(OSError, match="not empty"):
        publish(write(tmp_path / ".saving" / "step-5", content=b"second"), tmp_path / "step-5")
    set_aside(tmp_path / "step-5")
    set_aside(write(tmp_path / "step-5", content=b"third"))
    aside = {path.parent.name: path.read_bytes() for path in (tmp_path / "set_aside").rglob("data")}
    assert aside == {"step-5": b"first", "step-5-2": b"third"}


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
