"""A model's folder appears when it is complete; its safetensors files are written in parts and read with care."""

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_files import (
    INDEX_FILE,
    SINGLE_FILE,
    SavedTensors,
    ShardWriter,
    new_target,
)

TENSORS = {name: torch.randn(10, 10) for name in ("a", "b", "c", "d", "e")}  # 400 bytes each
SHAPES = {name: (10, 10) for name in TENSORS}
FIRST = "model-00001-of-00003.safetensors"


def write(folder, shard_bytes, tensors=TENSORS):
    folder.mkdir(exist_ok=True)
    writer = ShardWriter(folder, shard_bytes)
    for name, tensor in tensors.items():
        writer.add(name, tensor)
    writer.finish()
    return sorted(path.name for path in folder.iterdir())


def test_few_tensors_are_one_file(tmp_path):
    assert write(tmp_path, 2000) == [SINGLE_FILE]
    read = load_file(tmp_path / SINGLE_FILE)
    assert read.keys() == TENSORS.keys() and all(torch.equal(read[name], TENSORS[name]) for name in read)


def test_many_tensors_are_several_files_and_an_index(tmp_path):
    assert len(write(tmp_path / "small files", 100)) == 5 + 1, "a tensor larger than a file has its own"
    tmp_path /= "files"
    names = write(tmp_path, 800)
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + [INDEX_FILE]
    index = json.loads((tmp_path / INDEX_FILE).read_text())
    assert index["metadata"] == {"total_size": 2000}
    assert [index["weight_map"][name] for name in "abcde"] == [names[i] for i in (0, 0, 1, 1, 2)]
    saved = SavedTensors(tmp_path)
    assert saved.shapes == SHAPES
    assert all(torch.equal(saved[name], TENSORS[name]) for name in TENSORS)


def test_a_single_file_goes_before_an_index_as_in_transformers(tmp_path):
    write(tmp_path, 800, {name: tensor + 1 for name, tensor in TENSORS.items()})
    write(tmp_path, 2000)
    saved = SavedTensors(tmp_path)
    assert saved.shapes == SHAPES and all(torch.equal(saved[name], TENSORS[name]) for name in TENSORS)


def test_views_are_written_without_what_they_are_a_part_of(tmp_path):
    base = torch.arange(12.0).view(3, 4)
    write(tmp_path, 10**6, {"whole": base, "row": base[1], "transposed": base.t()})
    read = load_file(tmp_path / SINGLE_FILE)
    assert torch.equal(read["row"], base[1]) and torch.equal(read["transposed"], base.t())
    assert (tmp_path / SINGLE_FILE).stat().st_size < 500


def test_other_users_may_read_the_files_as_they_may_read_any(tmp_path):
    write(tmp_path, 800)
    (tmp_path / "any").touch()
    modes = {stat.S_IMODE(os.stat(path).st_mode) for path in tmp_path.iterdir()}
    assert len(modes) == 1


def make_index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def empty(folder):
    for path in folder.iterdir():
        path.unlink()


BROKEN = {
    "missing": (lambda f: (f / FIRST).unlink(), f"{FIRST} is missing, truncated or damaged: "),
    "no index": (lambda f: (f / INDEX_FILE).write_text("{"), f"{INDEX_FILE} is not valid JSON: "),
    "no weight_map": (lambda f: (f / INDEX_FILE).write_text("{}"), f"{INDEX_FILE} is damaged: KeyError: 'weight_map'"),
    "no name": (lambda f: make_index(f, {"a": 1}), f"{INDEX_FILE} is damaged: TypeError: "),
    "a pickle in the index": (
        lambda f: (torch.save({}, f / "a.bin"), make_index(f, {"a": "a.bin"})),
        "a.bin is missing, truncated or damaged: ",
    ),
    "a pickle": (
        lambda f: (empty(f), torch.save({}, f / "pytorch_model.bin")),
        "the folder has neither model.safetensors nor model.safetensors.index.json; save the model as safetens",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_broken_folders_are_refused_in_one_line(case, tmp_path):
    write(tmp_path, 800)
    break_it, message = BROKEN[case]
    break_it(tmp_path)
    with pytest.raises(ConfigError) as error:
        SavedTensors(tmp_path)
    assert str(error.value).startswith(f"MODEL_DIR = {str(tmp_path)!r}: {message}")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"a": None, "b": None}, f"2 of {len(SHAPES)} tensors are missing, such as a"),
        ({"extra": torch.zeros(1)}, "1 tensor(s) are not part of this model, such as extra"),
        ({"a": torch.zeros(10, 11)}, r"a has shape [10, 11], but config.json makes it [10, 10]"),
    ],
)
def test_tensors_of_another_model_are_refused(change, message, tmp_path):
    tensors = {name: tensor for name, tensor in {**TENSORS, **change}.items() if tensor is not None}
    save_file(tensors, tmp_path / SINGLE_FILE)
    with pytest.raises(ConfigError) as error:
        SavedTensors(tmp_path).require(SHAPES, optional={"old": (2,)})
    assert str(error.value) == f"MODEL_DIR = {str(tmp_path)!r}: {message}"


def test_optional_tensors_and_frequencies_may_be_there(tmp_path):
    save_file({**TENSORS, "old": torch.zeros(2), "layer.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / SINGLE_FILE)
    SavedTensors(tmp_path).require(SHAPES, optional={"old": (2,), "older": (3,)})


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_tensor_that_is_not_finite_is_refused_with_its_name(value, tmp_path):
    save_file({"a": torch.ones(2), "b": torch.tensor([0.0, value], dtype=torch.bfloat16)}, tmp_path / SINGLE_FILE)
    saved = SavedTensors(tmp_path)
    assert torch.equal(saved["a"], torch.ones(2))
    with pytest.raises(ConfigError, match="^MODEL_DIR = .*: b has values that are not finite$"):
        saved["b"]


def test_the_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "out"
    with new_target(target, "DIR") as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["out"] and (target / "a").read_text() == "1"


@pytest.mark.parametrize("is_link", [False, True])
def test_an_empty_folder_is_taken_and_a_link_to_one_followed(is_link, tmp_path):
    (tmp_path / "real").mkdir()
    target = tmp_path / ("link" if is_link else "real")
    if is_link:
        target.symlink_to("real")
    with new_target(target, "DIR") as folder:
        (folder / "a").touch()
    assert target.is_symlink() == is_link and (tmp_path / "real" / "a").exists()


def test_the_current_folder_is_refused_and_a_new_one_in_it_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^DIR = '.' is the folder that you are in; choose another folder$"):
        with new_target(Path("."), "DIR"):
            raise AssertionError("too late")
    with new_target(Path("out"), "DIR") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()


def folder_with_a_file(path):
    path.mkdir()
    (path / "a").touch()


@pytest.mark.parametrize(
    "make", [folder_with_a_file, lambda path: path.touch(), lambda path: path.symlink_to("nowhere")]
)
def test_what_exists_is_refused_before_anything_is_done(make, tmp_path):
    make(tmp_path / "out")
    with pytest.raises(ConfigError, match="^DIR = '.*out' exists; choose another folder, or remove it$"):
        with new_target(tmp_path / "out", "DIR"):
            raise AssertionError("too late")


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    with pytest.raises(ConfigError, match="RUN_DIR = '.*out' was written by another process; choose"):
        with new_target(tmp_path / "out", "RUN_DIR"):
            folder_with_a_file(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "a").exists()


def test_a_place_that_cannot_be_written_and_a_full_disk_are_one_line(tmp_path, full_disk):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^DIR = '.*file/out' cannot be made: "):
        with new_target(tmp_path / "file" / "out", "DIR"):
            pass
    with pytest.raises(ConfigError, match="cannot be made: .*File too large"), full_disk(10):
        with new_target(tmp_path / "out", "DIR") as folder:
            (folder / "a").write_bytes(b"0" * 100)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
