"""Wrong settings and damaged files of the user: each is a ConfigError of one line, and nothing is left in the cache."""

import gzip
import io
import json
import tarfile
from contextlib import contextmanager

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mxtrain.data import DataConfig, prepare
from mxtrain.data import prepared as prepared_module
from mxtrain.errors import ConfigError


def silent(line: str) -> None:
    pass


@contextmanager
def refused(message: str):
    """The context raises a ConfigError of one line that holds ``message``."""
    with pytest.raises(ConfigError) as caught:
        yield caught
    assert message in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [-1, 257])
def test_a_vocabulary_without_room_for_all_bytes(size):
    with refused(f"data.vocab_size = {size} is too small: a byte-level BPE has at least 258 tokens"):
        DataConfig(vocab_size=size)
    assert DataConfig(vocab_size=size, tokenizer_path="somewhere").vocab_size == size, "a tokenizer has its own size"


@pytest.mark.parametrize("dataset", ["hf", "c4"])
def test_max_bytes_does_not_apply_to_a_stream(dataset):
    with refused(f"data.max_bytes = 5 does not apply to training.dataset = '{dataset}'"):
        DataConfig(dataset=dataset, path="some/set", max_bytes=5)


def tar(content: bytes) -> bytes:
    """Return an archive in which all bytes are UTF-8."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as archive:
        member = tarfile.TarInfo("wiki.jsonl")
        member.size = len(content)
        archive.addfile(member, io.BytesIO(content))
    return packed.getvalue()


GOOD = b"some text\n"
LINE = b'{"text": "some text"}\n'
PARQUET = {"body": ["some text"], "id": [1]}

# Files: their contents by name, the path, other settings, and the message; {path} stands for the path.
FILES = [
    ({}, "", {}, "training.dataset = 'files' needs training.dataset_path"),
    ({}, "none.txt", {}, "training.dataset_path = '{path}' does not exist and matches no files"),
    ({}, "*.jsonl", {"section": "validation"}, "validation.dataset_path = '{path}' does not exist and matches no"),
    ({"in/.hidden": GOOD}, "in", {}, "training.dataset_path = '{path}' holds no files"),
    ({"a.txt": b""}, "a.txt", {}, "training.dataset_path = '{path}') holds no text"),
    ({"a.txt": GOOD}, "a.txt", {"max_bytes": 9}, "holds no text within data.max_bytes = 9"),
    (
        {"in/a.txt": GOOD, "in/b.jsonl": LINE},
        "in",
        {},
        "mixes formats (1 .txt, 1 .jsonl); select one with a glob such as '**/*.jsonl'",
    ),
    ({"a.txt": b"caf\xe9 au lait"}, "a.txt", {}, "cannot read {path} as text: 'utf-8' codec can't decode"),
    (
        {"a.doc": b"\xff" * 4},
        "a.doc",
        {},
        "; formats are .jsonl, .ndjson, .json, .parquet, .arrow, .feather, .csv, .tsv,",
    ),
    (
        {"wiki.tar": tar(LINE)},
        "wiki.tar",
        {},
        "cannot read {path} as text: the file is not text",
    ),
    ({"a.csv": b"id,story\n1,some text\n"}, "a.csv", {}, "'text' is not a column of {path}, which has: id, story"),
    ({"a.csv": b'text\n"some "quoted" text"\n'}, "a.csv", {}, "cannot read {path} as csv: ',' expected after '\"'"),
    ({"a.gz": gzip.compress(GOOD * 999)[:40]}, "a.gz", {}, "cannot read {path} as text: Compressed file ended"),
    ({"a.jsonl": LINE + b"nope\n"}, "a.jsonl", {}, "cannot read {path} as json: line 2: Expecting value"),
    ({"a.jsonl": LINE + b'["b"]\n'}, "a.jsonl", {}, "cannot read {path} as json: line 2 holds a JSON list, not an"),
    ({"a.parquet": b"not parquet"}, "a.parquet", {}, "cannot read {path} as parquet"),
    ({"a.parquet": PARQUET}, "a.parquet", {}, "data.text_key = 'text' is not a column of {path}, which has: body, id"),
    ({"a.parquet": PARQUET}, "a.parquet", {"text_key": "id"}, "data.text_key = 'id' in {path} holds int, not text"),
    ({"a.jsonl": b'{"id": 1, "b": 2}\n{"text": 3}\n'}, "a.jsonl", {}, "is not a column of {path}, which has: id, b"),
    ({"a.jsonl": b'{"text": ["a"]}\n'}, "a.jsonl", {}, "data.text_key = 'text' in {path} holds list, not text"),
    ({"a.jsonl": b'{"text": null}\n'}, "a.jsonl", {}, "data.text_key = 'text' in {path} holds NoneType, not text"),
    ({"a.jsonl": LINE}, "a.jsonl", {"text_key": ""}, "data.text_key = '' is not a column of {path}"),
    ({"a.txt": GOOD}, "a.txt", {"prepared": "files-0"}, "data.prepared = 'files-0' names '"),
]


@pytest.mark.parametrize("files, path, settings, message", FILES)
def test_files(files, path, settings, message, tmp_path, cache):
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        if isinstance(content, dict):
            pq.write_table(pa.table(content), tmp_path / name)
        else:
            (tmp_path / name).write_bytes(content)
    full = str(tmp_path / path) if path else ""
    config = DataConfig(dataset="files", path=full, vocab_size=300, **settings)
    with refused(message.replace("{path}", full)):
        prepare(config, silent)
    assert not cache.exists() or all(path.suffix == ".lock" for path in cache.iterdir())


def test_unknown_dataset(cache):
    with refused("training.dataset = 'Python' is not one of: 'python', 'files', 'hf'"):
        prepare(DataConfig(dataset="Python"), silent)
    assert not cache.exists()


TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"some": 0, "text": 1}, "unk_token": "some"}}'
CLASS = '{"tokenizer_class": "NoClassTokenizer", "auto_map": {"AutoTokenizer": ["code.NoClassTokenizer", null]}}'

# tokenizer.json, tokenizer_config.json, message.
TOKENIZERS = [
    (None, None, "holds no tokenizer.json"),
    ("{", None, "tokenizer.json cannot be read"),
    (TOKENIZER, "{'bos_token': 1}", "tokenizer_config.json is not valid JSON"),
    (TOKENIZER, "[]", "tokenizer_config.json holds list, not dict"),
    (TOKENIZER, '{"eos_token": "</s>"}', "eos_token = '</s>' is not in tokenizer.json"),
    (TOKENIZER, '{"bos_token": 5}', "bos_token = 5 is not in tokenizer.json"),
    (TOKENIZER, CLASS, "transformers must find its bos and eos tokens, and failed ("),
    (TOKENIZER, None, "has neither a bos nor an eos token, so nothing would separate documents: name one in"),
]


@pytest.mark.parametrize("tokenizer, config, message", TOKENIZERS)
def test_tokenizers(tokenizer, config, message, tmp_path, cache):
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    for name, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        if content is not None:
            (folder / name).write_text(content)
    (tmp_path / "a.txt").write_bytes(GOOD)
    with refused(message) as caught:
        prepare(DataConfig(dataset="files", path=str(tmp_path / "a.txt"), tokenizer_path=str(folder)), silent)
    assert str(caught.value).startswith(f"model.hf_assets_path = {str(folder)!r}")
    assert not cache.exists() or all(path.suffix == ".lock" for path in cache.iterdir())


def test_the_tokenizer_of_these_tests_is_good(tmp_path):
    (tmp_path / "tokenizer.json").write_text(TOKENIZER)
    (tmp_path / "a.txt").write_bytes(GOOD)
    path = str(tmp_path / "a.txt")
    config = DataConfig(dataset="files", path=path, tokenizer_path=str(tmp_path), unseparated=True)
    report = prepare(config, silent).report
    assert (report.vocab_size, report.train_tokens, report.separators) == (2, 1, "")


# The cache


@pytest.fixture
def text(tmp_path):
    (tmp_path / "a.txt").write_bytes(GOOD * 200)
    return {"dataset": "files", "path": str(tmp_path / "a.txt"), "vocab_size": 300, "validation_share": 0.0}


def test_a_cache_that_is_a_file(text, tmp_path):
    with refused(f"data.cache_dir = {text['path']!r}: cannot write '{text['path']}/files-") as caught:
        prepare(DataConfig(**text, cache_dir=text["path"]), silent)
    assert "(File exists)" in str(caught.value)


@pytest.mark.parametrize("limit", [500, 2000])
def test_a_full_disk(text, cache, limit, full_disk):
    """The disk is full for the tokens (500 bytes), or for the tokenizer."""
    if limit == 500:  # with a tokenizer of few bytes
        folder = cache.parent / "tokenizer"
        folder.mkdir()
        (folder / "tokenizer.json").write_text(TOKENIZER.replace("}}", '}, "pre_tokenizer": {"type": "Whitespace"}}'))
        text |= {"tokenizer_path": str(folder), "unseparated": True}
    with full_disk(limit), refused(f"data.cache_dir = '': cannot write '{cache}/files-") as caught:
        prepare(DataConfig(**text), silent)
    assert "(File too large); make room" in str(caught.value)
    assert all(path.suffix == ".lock" for path in cache.iterdir())


def test_a_file_that_vanishes_while_it_is_read(text, cache, tmp_path, monkeypatch):
    def late(*args):
        (tmp_path / "a.txt").unlink()
        return tokenize(*args)

    tokenize = prepared_module._tokenize
    monkeypatch.setattr(prepared_module, "_tokenize", late)
    with refused(f"cannot read {text['path']} as text: [Errno 2] No such file or directory"):
        prepare(DataConfig(**text), silent)
    assert all(path.suffix == ".lock" for path in cache.iterdir())


def test_a_few_rows_without_text_are_counted(tmp_path):
    rows = [{"text": f"row {i} of a small text"} for i in range(50)]
    bad = [{"text": None}, {"body": "x"}, {"text": 3}]
    for name, lines in (("a.jsonl", rows[:25] + bad[:2]), ("b.jsonl", [{"body": "y"}]), ("c.jsonl", rows[25:])):
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in lines))
    (tmp_path / "d.jsonl").write_text(json.dumps(bad[2]) + "\n")
    report = prepare(DataConfig(dataset="files", path=str(tmp_path / "*.jsonl"), vocab_size=300), silent).report
    assert report.documents == 50 and report.dropped == {"without text": 4}
    assert "4 without text" in str(report)
