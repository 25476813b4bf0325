"""The folder of a prepared text: its tokens, its report, its damages."""

import json
import logging
import os
import signal
from dataclasses import replace

import numpy as np
import pytest

from mxtrain.data import DataConfig, TokenFile, encode, prepare, store, token_file
from mxtrain.data.documents import Document, Progress, is_held_out
from mxtrain.data.store import DamagedText, TextReport, load_text, tokenize
from mxtrain.data.tokenizer import EOS_TOKEN, load_tokenizer, tokenizer_hash, train_tokenizer
from mxtrain.errors import ConfigError

SILENT = Progress(lambda line: None)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, prose):
    folder = tmp_path_factory.mktemp("store") / "tokenizer"
    train_tokenizer([prose(0)], 300, folder, SILENT)
    return load_tokenizer(folder)


def split_documents(tokens: np.ndarray, tokenizer) -> list[str]:
    """Return the texts between each bos and the next eos."""
    starts, ends = (np.flatnonzero(tokens == i) for i in (tokenizer.bos_id, tokenizer.eos_id))
    return [tokenizer.encoder.decode(tokens[s + 1 : e]) for s, e in zip(starts, ends, strict=True)]


def test_each_file_holds_its_documents_in_order(tokenizer, tmp_path, prose, monkeypatch):
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 2000)
    documents = [Document(f"doc{i}", prose(i, 40)) for i in range(50)] + [Document("odd", f"a{EOS_TOKEN}\u2028é")]
    files, counts = tokenize(documents, tokenizer, tmp_path, 0.3, 0, SILENT)
    for split, held_out in (("train", False), ("validation", True)):
        expected = [document.text for document in documents if is_held_out(document.key, 0.3) == held_out]
        tokens = files[split].open()
        assert split_documents(tokens, tokenizer) == expected and len(expected) > 5
        assert (tokens[0], tokens[-1]) == (tokenizer.bos_id, tokenizer.eos_id)
        assert counts[f"{split}_tokens"] == files[split].count == len(tokens)
    assert (counts["documents"], counts["validation_documents"]) == (51, len(expected))
    assert counts["bytes"] == sum(len(document.text.encode()) for document in documents)


@pytest.mark.parametrize("size, dtype", [(300, "<u2"), (1 << 16, "<u2"), ((1 << 16) + 1, "<u4")])
def test_ids_are_stored_in_the_narrowest_type_that_holds_them(tokenizer, tmp_path, size, dtype):
    files, _ = tokenize([Document("a", "text")], tokenizer._replace(size=size), tmp_path, 0.0, 0, SILENT)
    assert files["train"].dtype == dtype
    assert (tmp_path / "train.bin").stat().st_size == files["train"].count * int(dtype[-1])
    assert split_documents(files["train"].open(), tokenizer) == ["text"]


def test_a_tokenizer_without_bos_separates_documents_with_eos(tokenizer, tmp_path):
    documents = [Document("a", "text"), Document("b", "text")]
    files, _ = tokenize(documents, tokenizer._replace(bos_id=None), tmp_path, 0.0, 0, SILENT)
    tokens = files["train"].open().tolist()
    assert tokens.count(tokenizer.bos_id) == 0
    assert tokens.count(tokenizer.eos_id) == 2 and tokens[-1] == tokenizer.eos_id


def test_an_empty_file_can_be_opened(tmp_path):
    assert TokenFile(tmp_path / "absent.bin", "<u2", 0).open().shape == (0,)


# The report


def test_report_of_a_tokenized_text():
    report = TextReport(
        dataset="python",
        folder="/cache/python-1",
        vocab_size=2048,
        requested_vocab_size=4096,
        files=1790,
        documents=1717,
        bytes=30_500_000,
        train_tokens=10_013_521,
        validation_documents=9,
        validation_tokens=46_623,
        dropped={"duplicate": 19, "machine-made": 22, "unreadable": 0},
        separators="begins with '<s>'",
        formats={"json": 1_000, "text": 790},
        cut={"a": 6_000_000, "b": 500_000},
    )
    assert str(report).splitlines() == [
        "dataset               python",
        "folder                /cache/python-1",
        "vocab size            2,048",
        "requested vocab size  4,096",
        "files                 1,790",
        "documents             1,717",
        "bytes                 30,500,000",
        "train tokens          10,013,521",
        "validation documents  9",
        "validation tokens     46,623",
        "dropped               19 duplicate, 22 machine-made",
        "cut                   a by 6.0 MB, b by 0.5 MB",
        "formats               1,000 json, 790 text",
        "separators            begins with '<s>'",
    ]
    files = "1,717 documents, 30.5 MB; files: 1,000 json, 790 text"
    assert report.line == f"{files}; each document begins with '<s>'; left out: 19 duplicate, 22 machine-made"


# Damage


def silent(line: str) -> None:
    pass


@pytest.fixture
def config(tmp_path, prose):
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": prose(i)}) + "\n" for i in range(20)))
    return DataConfig(dataset="files", path=str(tmp_path / "a.jsonl"), vocab_size=300, validation_share=0.2)


def cut(file) -> None:
    file.write_bytes(file.read_bytes()[:-2])


def edit_summary(**changes):
    return lambda file: file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def flip(file):
    """Change a bit, as a partial copy, a failing disk or a power failure may."""
    content = bytearray(file.read_bytes())
    content[10] ^= 1
    file.write_bytes(content)


def remove(file) -> None:
    file.unlink()


MISSING = "prepared.json is missing, damaged or of an earlier version"

DAMAGES = [
    ("train.bin", cut, "train.bin has"),
    ("train.bin", remove, "train.bin cannot be read: No such file or directory"),
    ("validation.bin", lambda file: file.write_bytes(file.read_bytes() * 2), "validation.bin has"),
    ("train.bin", flip, "the contents of train.bin have changed"),
    ("prepared.json", remove, MISSING),
    ("prepared.json", lambda file: file.write_text("[]"), MISSING),
    ("prepared.json", edit_summary(tokens={}), MISSING),
    ("prepared.json", edit_summary(tokens={"train": {"dtype": "<u3", "count": 5}}), MISSING),
    ("prepared.json", edit_summary(tokenizer=None), MISSING),
    ("prepared.json", edit_summary(report={"dataset": "files"}), MISSING),
    ("tokenizer/tokenizer.json", cut, "its tokenizer is damaged"),
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
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [first.folder.name]
    (line,) = [record.getMessage() for record in caplog.records if record.name.startswith("mxtrain")]
    assert line.startswith(f"the prepared text {first.folder} is damaged ({message}")
    assert prepare(chosen, silent) == first


def test_tokens_that_cannot_be_read_are_damage(config, monkeypatch):
    folder = prepare(config, silent).folder

    def fails(path, *span):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(token_file, "hash_file", fails)
    with pytest.raises(DamagedText, match="^train.bin cannot be read: Input/output error$"):
        load_text(folder, again=True)


def read_files(monkeypatch) -> list[str]:
    """Return a list that gets the names of the files that are read for their hash."""
    names, hash_file = [], token_file.hash_file
    monkeypatch.setattr(token_file, "hash_file", lambda path, *span: names.append(path.name) or hash_file(path, *span))
    return names


def test_a_machine_reads_a_text_once_for_its_hash(config, cache, tmp_path, monkeypatch):
    read = read_files(monkeypatch)
    first, splits = prepare(config, silent), ["train.bin", "validation.bin"]
    prepare(config, silent)
    assert read == [], "this machine has written it"
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    prepare(config, silent)
    prepare(config, silent)
    assert read == splits
    os.utime(first.folder / "train.bin", (0, 0))
    prepare(config, silent)
    assert read == [*splits, "train.bin"], "it may be a copy"
    (cache / "verified").unlink()
    (cache / "verified").mkdir()  # as if others owned the folder
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "own"))
    (tmp_path / "own").mkdir()
    shared = replace(config, cache_dir=str(cache))
    prepare(shared, silent)
    prepare(shared, silent)
    assert read == [*splits, "train.bin", *splits]


# Shards


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(store, "SHARD_BYTES", 3000)
    monkeypatch.setattr(encode, "BATCH_CHARACTERS", 2500)


def test_shards_hold_the_tokens_of_one_file(config, cache, monkeypatch, small_shards, tmp_path):
    sharded = prepare(config, silent)
    assert len(sharded.train.shards) == len(sharded.validation.shards) > 5
    assert {path.name for path in sharded.folder.glob("train*")} >= {"train.bin", "train.1.bin", "train.5.bin"}
    monkeypatch.setattr(store, "SHARD_BYTES", 1 << 28)
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "other"))
    whole = prepare(config, silent)
    assert not whole.train.shards
    for one, parts in ((whole.train, sharded.train), (whole.validation, sharded.validation)):
        expected, tokens = one.open(), parts.open()
        assert len(tokens) == parts.count == len(expected) == one.count
        assert np.array_equal(tokens[:], expected) and tokens[:].dtype == expected.dtype
        for start in range(0, len(expected), 97):
            assert np.array_equal(tokens[start : start + 150], expected[start : start + 150])
    assert load_text(sharded.folder, again=True) == sharded


def test_a_long_text_is_read_for_its_hashes_when_it_is_used(config, monkeypatch, small_shards):
    prepared = prepare(config, silent)
    flip(prepared.train.shards[4].path)
    read = read_files(monkeypatch)
    monkeypatch.setattr(store, "SHARDS_AT_START", 3)
    monkeypatch.setattr("socket.gethostname", lambda: "another")
    assert prepare(config, silent) == prepared and read == []
    tokens, hashed, sha256 = prepared.train.open(), [], token_file.sha256

    def counted(content):
        hashed.extend([len(content)] if isinstance(content, np.ndarray) else [])
        return sha256(content)

    monkeypatch.setattr(token_file, "sha256", counted)
    sizes = [shard.count for shard in prepared.train.shards]
    tokens[:10]
    tokens[5 : sizes[0] + 1]
    assert hashed == sizes[:2]
    prepared.train.open()[: sizes[0]]
    assert hashed == sizes[:2], "another process need not read them again"
    with pytest.raises(ConfigError, match="is damaged: the contents of train.4.bin have changed; 'mxtrain cache --rem"):
        tokens[:]
    with pytest.raises(DamagedText, match="the contents of train.4.bin have changed"):
        load_text(prepared.folder, again=True)


def kill_after_shards(count: int, config) -> None:
    """Prepare a text in another process, which is killed when it has written so many shards."""
    if not (process := os.fork()):
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # a forked process has none of its threads
        replace_file, written = store.replace_file, []

        def killed(path, content):
            replace_file(path, content)
            written.append(path)
            if len(written) == count:
                os.kill(os.getpid(), signal.SIGKILL)

        store.replace_file = killed
        try:
            prepare(config, silent)
        finally:
            os._exit(1)
    assert os.waitpid(process, 0)[1] == signal.SIGKILL


def contents(folder) -> dict[str, bytes]:
    files = {path.name: path.read_bytes() for path in sorted(folder.rglob("*.*"))}
    return {name: content.replace(str(folder.parent).encode(), b"") for name, content in files.items()}


def test_a_killed_preparation_goes_on_after_its_last_whole_shard(config, cache, small_shards, tmp_path):
    whole = contents(prepare(replace(config, cache_dir=str(tmp_path / "whole")), silent).folder)
    lines = []
    kill_after_shards(3, config)
    (left,) = cache.glob("*.building-*")
    left_shards = {path.name: path.stat().st_mtime_ns for path in left.glob("train*")}
    second = prepare(config, lines.append)
    assert contents(second.folder) == whole
    assert left_shards.items() <= {p.name: p.stat().st_mtime_ns for p in second.folder.glob("train*")}.items()
    assert len(left_shards) == 3 < len(second.train.shards)
    assert any(line.startswith("going on after 3 shard(s), 0.0 MB") for line in lines)
    assert not any("training a byte-level BPE" in line for line in lines)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == [second.folder.name]


@pytest.mark.parametrize("why", ["a damaged shard", "another machine", "no locks"])
def test_a_preparation_that_cannot_go_on_begins_anew(config, cache, monkeypatch, small_shards, tmp_path, why):
    whole = contents(prepare(replace(config, cache_dir=str(tmp_path / "whole")), silent).folder)
    kill_after_shards(3, config)
    (left,) = cache.glob("*.building-*")
    lines = []
    if why == "a damaged shard":
        flip(left / "train.1.bin")
    elif why == "another machine":
        monkeypatch.setattr("socket.gethostname", lambda: "another")
    else:
        monkeypatch.setattr("fcntl.flock", lambda *args: os.stat("/no locks"))
    assert contents(prepare(config, lines.append).folder) == whole
    assert not any(line.startswith("going on") for line in lines)
    assert left.exists() == (why != "a damaged shard")
    if why == "another machine":
        (cache / prepare(config, silent).folder.name / "prepared.json").unlink()
        monkeypatch.setattr(store, "ABANDONED_SECONDS", -1.0)
        assert contents(prepare(config, lines.append).folder) == whole
        assert any(line.startswith("going on after 3") for line in lines) and not left.exists()


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
