import json
import logging

import pytest

from mxtrain.data import DataConfig, prepare, prepared_text
from mxtrain.data.prepared_text import DamagedText, load_text
from mxtrain.data.tokenizer import tokenizer_hash
from mxtrain.errors import ConfigError


def silent(line: str) -> None:
    pass


@pytest.fixture
def config(tmp_path, prose):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": prose(i)}) + "\n" for i in range(20)))
    return DataConfig(dataset="files", path=str(tmp_path / "a.jsonl"), vocab_size=300, validation_share=0.2)


def cut(file) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def edit_summary(**changes):
    def edit(file) -> None:
        summary = json.loads(file.read_text())
        file.write_text(json.dumps({**summary, **changes}))

    return edit


def flip(file):
    """Change a bit, as a partial copy, a failing disk or a power failure may."""
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)


MISSING = "prepared.json is missing, damaged or of an earlier version"

DAMAGES = [
    ("train.bin", cut, "train.bin has"),
    ("train.bin", lambda file: file.unlink(), "train.bin has 0 bytes instead of"),
    ("validation.bin", lambda file: file.write_bytes(file.read_bytes() * 2), "validation.bin has"),
    ("train.bin", flip, "the contents of train.bin have changed"),
    ("validation.bin", flip, "the contents of validation.bin have changed"),
    ("prepared.json", lambda file: file.unlink(), MISSING),
    ("prepared.json", lambda file: file.write_text(""), MISSING),
    ("prepared.json", lambda file: file.write_text("[]"), MISSING),
    ("prepared.json", lambda file: file.write_bytes(b"\xff{}"), MISSING),
    ("prepared.json", cut, MISSING),
    ("prepared.json", edit_summary(tokens={}), "prepared.json is damaged"),
    (
        "prepared.json",
        edit_summary(tokens={"train": {"dtype": "<u3", "count": 5}}),
        MISSING,
    ),
    ("prepared.json", edit_summary(tokens={"train": {"dtype": "<u2"}}), MISSING),
    ("prepared.json", edit_summary(tokens={"train": {"dtype": "<u2", "count": "5"}}), MISSING),
    ("prepared.json", edit_summary(tokens={"train": {"dtype": "<u2", "count": 5, "sha256": None}}), MISSING),
    ("prepared.json", edit_summary(tokens=None), MISSING),
    ("prepared.json", edit_summary(tokenizer=None), MISSING),
    ("prepared.json", edit_summary(report={"dataset": "files"}), MISSING),
    ("tokenizer/tokenizer.json", cut, "its tokenizer is damaged"),
    ("tokenizer/tokenizer.json", lambda file: file.unlink(), "its tokenizer is damaged"),
    ("tokenizer/tokenizer_config.json", lambda file: file.write_text("{}"), "its tokenizer is damaged"),
]


@pytest.mark.parametrize("name, damage, message", DAMAGES)
def test_a_damaged_text_is_prepared_again_with_one_line(config, cache, name, damage, message, caplog):
    first = prepare(config, silent)
    damage(first.folder / name)
    with pytest.raises(DamagedText, match=message):
        load_text(first.folder, reads_tokens=True)
    chosen = DataConfig(dataset="files", prepared=first.folder.name)
    with pytest.raises(ConfigError, match=f"data.prepared = '{first.folder.name}' is damaged .*{message}"):
        prepare(chosen, silent)
    caplog.set_level(logging.INFO)
    second = prepare(config, silent)
    assert second == first and prepare(config, silent) == load_text(first.folder, reads_tokens=True) == first
    assert [path.name for path in cache.iterdir()] == [first.folder.name]
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("mxtrain")]
    assert line.startswith(f"the prepared text {first.folder} is damaged ({message}")
    assert prepare(chosen, silent) == first


def test_tokens_that_cannot_be_read_are_damage(config, cache, monkeypatch):
    folder = prepare(config, silent).folder

    def fails(path):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(prepared_text, "hash_file", fails)
    with pytest.raises(DamagedText, match="^train.bin cannot be read: Input/output error$"):
        load_text(folder, reads_tokens=True)


def test_the_identity_depends_on_contents_alone(config, tmp_path, prose, monkeypatch):
    first = prepare(config, silent)
    assert first.identity.keys() == {"tokenizer", "train", "validation", "dtype"}
    assert first.identity["tokenizer"] == tokenizer_hash(first.tokenizer)
    moved = tmp_path / "elsewhere" / "a.jsonl"
    moved.parent.mkdir()
    moved.write_bytes((tmp_path / "a.jsonl").read_bytes())
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "other cache"))
    same = prepare(DataConfig(**{**vars(config), "path": str(moved)}), silent)
    assert same.identity == first.identity and same.folder.name != first.folder.name
    with moved.open("a") as file:
        file.write(json.dumps({"text": prose(99)}) + "\n")
    other = prepare(DataConfig(**{**vars(config), "path": str(moved)}), silent)
    assert other.identity["train"] != first.identity["train"]


def test_a_chosen_text_is_loaded_without_its_source(config, tmp_path, monkeypatch):
    first = prepare(config, silent)
    (tmp_path / "a.jsonl").unlink()
    by_name = DataConfig(dataset="files", prepared=first.folder.name)
    by_path = DataConfig(dataset="files", prepared=str(first.folder))
    assert prepare(by_name, silent) == prepare(by_path, silent) == first
    with pytest.raises(ConfigError, match="is a text of training.dataset = 'files', not 'python'; set the dataset"):
        prepare(DataConfig(prepared=first.folder.name), silent)
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=f"data.prepared = '{first.folder.name}': there is no folder '.*/empty/files"):
        prepare(by_name, silent)
    assert prepare(by_path, silent) == first


def test_a_chosen_text_needs_its_tokenizer(config, tmp_path):
    trained = prepare(config, silent)
    folder = tmp_path / "tokenizer"
    trained.tokenizer.rename(folder)
    own = prepare(DataConfig(**{**vars(config), "tokenizer_path": str(folder)}), silent)
    chosen = DataConfig(dataset="files", prepared=own.folder.name)
    assert prepare(chosen, silent) == own and own.tokenizer == folder
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match="model.hf_assets_path = '.*tokenizer' is not the tokenizer of the prepared"):
        prepare(chosen, silent)
