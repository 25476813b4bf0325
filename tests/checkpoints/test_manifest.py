"""The manifest of a checkpoint, and what it finds out about damaged files."""

import json
from dataclasses import asdict
from hashlib import sha256

import pytest

from mxtrain.checkpoints import manifest as module
from mxtrain.checkpoints.manifest import (
    MANIFEST_FILE,
    DamagedCheckpoint,
    Manifest,
    check_hashes,
    check_sizes,
    file_record,
    read_manifest,
    write_manifest,
)
from mxtrain.files import FileRecord, hash_file

CONTENT = {"a": b"", "b": bytes(range(256)) * 40_000}  # larger than a piece that is read at a time


@pytest.fixture
def checkpoint(tmp_path):
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    files = {name: hash_file(tmp_path / name) for name in CONTENT}
    tensors = {"norm.weight": {"shape": [4], "dtype": "float32"}}
    settings = {"optimizer": {"lr": 1e-3}, "model": {"converters": ["mxnorm"]}}
    facts = ({"torch": None}, "ab" * 32, 2, {"mxnorm.p": 2})
    write_manifest(tmp_path, Manifest(7, True, files, tensors, settings, *facts))
    return tmp_path


def test_it_reads_back_as_written(checkpoint):
    manifest = read_manifest(checkpoint)
    assert manifest.files == {
        name: FileRecord(len(content), sha256(content).hexdigest()) for name, content in CONTENT.items()
    }
    assert (manifest.step, manifest.holds_trainer, manifest.processes) == (7, True, 2)
    assert manifest.settings == {"optimizer": {"lr": 1e-3}, "model": {"converters": ["mxnorm"]}}
    assert manifest.tensors["norm.weight"]["shape"] == [4] and manifest.versions == {"torch": None}
    assert manifest.defaults == {"mxnorm.p": 2}
    check_sizes(checkpoint, manifest)
    check_hashes(checkpoint, manifest, manifest.files)


def test_files_without_hashes_have_sizes(checkpoint):
    files = {name: file_record(checkpoint / name, with_hash=False) for name in CONTENT}
    write_manifest(checkpoint, Manifest(7, True, files))
    manifest = read_manifest(checkpoint)
    assert manifest.files == files == {name: FileRecord(len(content), None) for name, content in CONTENT.items()}
    flip(checkpoint / "b")
    check_sizes(checkpoint, manifest)
    check_hashes(checkpoint, manifest, manifest.files)
    shorten(checkpoint / "b")
    with pytest.raises(DamagedCheckpoint, match="b has 10,239,999 bytes instead of 10,240,000"):
        check_sizes(checkpoint, manifest)


def test_a_manifest_of_a_version_that_kept_no_defaults(tmp_path):
    content = {"format": 1, **asdict(Manifest(7, True, {}))}
    del content["defaults"]
    (tmp_path / "manifest.json").write_text(json.dumps({**content, "sha256": module._own_hash(content)}))
    assert read_manifest(tmp_path) == Manifest(7, True, {})


def remove(path):
    path.unlink()


def shorten(path):
    path.write_bytes(path.read_bytes()[:-1])


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "damage, name, problem",
    [
        (remove, "b", "b is missing"),
        (shorten, "b", "b has 10,239,999 bytes instead of 10,240,000"),
        (flip, "b", "b has other content than was saved"),
        (lambda path: path.write_bytes(b"x"), "a", "a has 1 bytes instead of 0"),
        (remove, MANIFEST_FILE, "manifest.json is missing"),
        (shorten, MANIFEST_FILE, "manifest.json is not valid JSON: "),
        (flip, MANIFEST_FILE, "manifest.json is not valid JSON: "),
        (lambda path: path.write_bytes(b""), MANIFEST_FILE, "manifest.json is not valid JSON: "),
        (lambda path: path.write_text("[]"), MANIFEST_FILE, "manifest.json holds list, not dict"),
        (lambda path: (path.unlink(), path.mkdir()), MANIFEST_FILE, "manifest.json cannot be read: Is a directory"),
        (lambda path: (path.unlink(), path.mkdir()), "b", "b has "),
    ],
)
def test_damage_is_named(checkpoint, damage, name, problem):
    damage(checkpoint / name)
    with pytest.raises(DamagedCheckpoint) as error:
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
        check_hashes(checkpoint, manifest, manifest.files)
    assert str(error.value).startswith(problem)


@pytest.mark.parametrize("key", ["step", "settings", "files", "holds_trainer"])
def test_every_entry_is_covered_by_the_hash(checkpoint, key):
    path = checkpoint / MANIFEST_FILE
    content = json.loads(path.read_text())
    content[key] = {} if isinstance(content[key], dict) else 8
    path.write_text(json.dumps(content))
    with pytest.raises(DamagedCheckpoint, match="is damaged"):
        read_manifest(checkpoint)


def test_a_newer_format_is_named(checkpoint, monkeypatch):
    monkeypatch.setattr("mxtrain.checkpoints.manifest.FORMATS", (1, 2, 3))
    write_manifest(checkpoint, Manifest(7, True, {}))
    monkeypatch.undo()
    with pytest.raises(DamagedCheckpoint, match="has format 3, and this version reads 1 to 2$"):
        read_manifest(checkpoint)
