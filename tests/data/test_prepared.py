import bz2
import csv
import gzip
import io
import json
import os
import shutil
import struct

import pyarrow as pa
import pytest
from filelock import FileLock
from pyarrow import feather

from mxtrain.data import DataConfig, documents, prepare
from mxtrain.data import prepared as prepared_module
from mxtrain.data.documents import megabytes
from mxtrain.data.tokenizer import load_tokenizer, tokenizer_hash
from mxtrain.errors import ConfigError


def silent(line: str) -> None:
    pass


@pytest.fixture
def corpus(tmp_path, prose):
    """30 documents in a JSONL file."""
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": prose(i)}) + "\n" for i in range(30)))
    return path


def config_of(path, **fields) -> DataConfig:
    return DataConfig(dataset="files", path=str(path), **{"vocab_size": 300, "validation_share": 0.2, **fields})


def texts(file, tokenizer) -> list[str]:
    decoded = load_tokenizer(tokenizer).encoder.decode(file.open(), skip_special_tokens=False)
    return [part.removeprefix("<|begin_of_text|>") for part in decoded.split("<|end_of_text|>")[:-1]]


def test_local_text_is_split_and_tokenized(corpus, prose, cache):
    prepared = prepare(config_of(corpus), silent)
    train, validation = (texts(file, prepared.tokenizer) for file in (prepared.train, prepared.validation))
    assert len(validation) > 2 and sorted(train + validation) == sorted(prose(i) for i in range(30))
    report = prepared.report
    assert report.files == 1 and report.documents == 30 and report.validation_documents == len(validation)
    assert report.bytes == sum(len(prose(i)) for i in range(30))
    assert (report.train_tokens, report.validation_tokens) == (prepared.train.count, prepared.validation.count)
    assert report.vocab_size == report.requested_vocab_size == 300
    assert report.folder == str(prepared.tokenizer.parent) and prepared.tokenizer.is_relative_to(cache)
    assert "documents             30\n" in str(report)


def arrow(write):
    """Return a function that writes rows as a table with the function ``write`` of pyarrow."""

    def bytes_of(rows) -> bytes:
        table, out = pa.Table.from_pylist(rows), pa.BufferOutputStream()
        write(out, table)
        return out.getvalue().to_pybytes()

    return bytes_of


def stream(out, table):
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table, 7)


def file(out, table):
    with pa.ipc.new_file(out, table.schema) as writer:
        writer.write_table(table, 7)


def json_lines(rows) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def values(delimiter: str):
    def bytes_of(rows) -> bytes:
        out = io.StringIO()
        writer = csv.DictWriter(out, rows[0].keys(), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
        return out.getvalue().encode()

    return bytes_of


def zstd(content: bytes) -> bytes:
    """Pack as pzstd does: frames of parts, each after a frame that other readers skip."""
    skipped, middle = struct.pack("<III", 0x184D2A50, 4, 0), len(content) // 2
    parts = content[:middle], content[middle:]
    return b"".join(skipped + pa.compress(part, codec="zstd", asbytes=True) for part in parts)


KINDS = [
    ("RC_2023-01.zst", lambda rows: zstd(json_lines(rows)), "json"),
    ("wiki.jsonl.00", json_lines, "json"),
    ("wiki", lambda rows: bz2.compress(json_lines(rows)), "json"),
    ("a.csv", values(","), "csv"),
    ("a.tsv.gz", lambda rows: gzip.compress(values("\t")(rows)), "csv"),
    ("a.feather", arrow(lambda out, table: feather.write_feather(table, out, "lz4", 7)), "arrow"),
    ("a.arrow", arrow(file), "arrow"),
    ("b.arrow", arrow(stream), "arrow"),
]


def test_the_same_rows_in_a_file_of_another_kind_are_the_same_tokens(corpus, tmp_path):
    rows = [json.loads(line) | {"id": i} for i, line in enumerate(corpus.read_text().splitlines())]
    rows[3]["text"] = 'quoted "text",\n\n\twith a tab, ' + "and long, " * 20_000
    corpus.write_bytes(json_lines(rows))
    expected = prepare(config_of(corpus), silent)
    assert rows[3]["text"] in texts(expected.train, expected.tokenizer)
    for name, write, format in KINDS:
        (tmp_path / name).write_bytes(write(rows))
        prepared = prepare(config_of(tmp_path / name, tokenizer_path=str(expected.tokenizer)), silent)
        assert prepared.identity == expected.identity, name
        assert f"; files: 1 {format}; each" in prepared.report.line


def test_json_of_one_row_and_text_that_looks_like_json_at_first(tmp_path):
    """A file of one row is JSON Lines if the row has the text; other JSON is text among texts."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, content in (
        ("a", '{"text": "one row"}'),
        ("b", '{"lint": true}\n'),
        ("c.txt", '{\n"text": "of several lines"\n}\n'),
        ("d.txt", "{} is empty\n{} too\n"),
    ):
        (folder / name).write_text(content)
    prepared = prepare(config_of(folder, validation_share=0.0), silent)
    expected = ["one row", '{"lint": true}\n', '{\n"text": "of several lines"\n}\n', "{} is empty\n{} too\n"]
    assert texts(prepared.train, prepared.tokenizer) == expected
    assert "; files: 1 json, 3 text; " in prepared.report.line


def test_a_build_reports_its_progress_and_the_second_call_loads_without_building(corpus, monkeypatch):
    monkeypatch.setattr(documents, "TICK_SECONDS", 0.0)
    lines = []
    first = prepare(config_of(corpus), lines.append)
    assert lines[0] == f"preparing dataset 'files' in {first.folder}" and lines[-1] == "prepared dataset 'files'"
    assert any(line.startswith("read ") and line.endswith(" of text for the tokenizer") for line in lines)
    assert f"tokenized {megabytes(first.report.bytes)} of about {megabytes(corpus.stat().st_size)}" in lines
    lines.clear()
    monkeypatch.setattr(prepared_module, "_build", None)
    assert prepare(config_of(corpus), lines.append) == first
    assert lines == []


def test_an_edited_file_or_a_changed_setting_is_built_again(corpus, prose, monkeypatch):
    first = prepare(config_of(corpus), silent)
    assert prepare(config_of(corpus, seed=7), silent).tokenizer != first.tokenizer
    with corpus.open("a") as file:
        file.write(json.dumps({"text": prose(99)}) + "\n")
    second = prepare(config_of(corpus), silent)
    assert second.report.documents == 31
    os.utime(corpus, ns=(0, 0))
    third = prepare(config_of(corpus), silent)
    monkeypatch.setattr(prepared_module, "CACHE_VERSION", 0)
    fourth = prepare(config_of(corpus), silent)
    assert len({result.report.folder for result in (first, second, third, fourth)}) == 4


def test_a_process_waits_for_another_one_and_takes_its_text(corpus):
    first, lines = prepare(config_of(corpus), silent), []
    away, lock = first.folder.with_name("away"), FileLock(f"{first.folder}.lock")
    first.folder.rename(away)
    lock.acquire()

    def note(line: str) -> None:
        lines.append(line)
        away.rename(first.folder)
        lock.release()

    assert prepare(config_of(corpus), note) == first
    assert lines == [f"another process is preparing {first.folder}; waiting"]
    assert [path.name for path in first.folder.parent.iterdir() if path.is_dir()] == [first.folder.name]


def test_where_locks_do_not_work_there_is_no_lock(corpus, monkeypatch):
    def no_locks(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(prepared_module.fcntl, "flock", no_locks)
    assert prepare(config_of(corpus), silent).report.documents == 30


def test_an_existing_tokenizer_is_used(corpus, tmp_path, prose):
    trained = prepare(config_of(corpus), silent)
    other = tmp_path / "other.jsonl"
    other.write_text(json.dumps({"text": "other text"}) + "\n")
    config = config_of(other, vocab_size=350, tokenizer_path=str(trained.tokenizer), validation_share=0.0)
    prepared = prepare(config, silent)
    assert prepared.tokenizer == trained.tokenizer
    assert texts(prepared.train, trained.tokenizer) == ["other text"]
    assert (prepared.report.vocab_size, prepared.report.requested_vocab_size) == (300, 0)


def test_text_is_tokenized_again_when_the_tokenizer_changes(corpus, tmp_path):
    folder = tmp_path / "tokenizer"
    config = config_of(corpus, vocab_size=0, tokenizer_path=str(folder), unseparated=True)
    with pytest.raises(ConfigError, match="model.hf_assets_path = .* is not a folder"):
        prepare(config, silent)
    counts = []
    for size in (300, 350):
        trained = prepare(config_of(corpus, vocab_size=size), silent)
        folder.mkdir(exist_ok=True)
        (folder / "tokenizer.json").write_bytes((trained.tokenizer / "tokenizer.json").read_bytes())
        counts.append(prepare(config, silent).train.count)
    assert counts[0] > counts[1]


def test_text_is_tokenized_again_when_special_tokens_change_that_stand_elsewhere(corpus, tmp_path):
    trained, folder = prepare(config_of(corpus), silent), tmp_path / "tokenizer"
    shutil.copytree(trained.tokenizer, folder)
    (folder / "tokenizer_config.json").rename(folder / "special_tokens_map.json")
    config = config_of(corpus, vocab_size=0, tokenizer_path=str(folder))
    both = prepare(config, silent)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_text|>"}')
    assert prepare(config, silent).train.count < both.train.count == trained.train.count


def test_a_stream_trains_a_tokenizer_and_is_not_tokenized(prose):
    opened = []

    def stream():
        opened.append(True)
        return (prose(i) for i in range(10))

    config = DataConfig(dataset="elsewhere", vocab_size=300)
    prepared = prepare(config, silent, stream=stream)
    assert load_tokenizer(prepared.tokenizer).size == 300
    assert prepared.train is None and prepared.validation is None and prepared.report.streamed
    assert prepare(config, silent, stream=stream) == prepared and len(opened) == 1
    existing = DataConfig(dataset="elsewhere", vocab_size=0, tokenizer_path=str(prepared.tokenizer))
    assert prepare(existing, silent, stream=stream).report.vocab_size == 300
    assert len(opened) == 1  # an existing tokenizer opens no stream


def test_an_empty_stream_is_a_config_error():
    with pytest.raises(ConfigError, match="training.dataset = 'elsewhere' holds no text to train a tokenizer on"):
        prepare(DataConfig(dataset="elsewhere", vocab_size=300), silent, stream=lambda: ["", " \n"])


def test_a_vocabulary_smaller_than_requested_is_reported(tmp_path):
    (tmp_path / "poor.txt").write_text("abc abc\n" * 9)
    report = prepare(config_of(tmp_path / "poor.txt", vocab_size=2048, validation_share=0.0), silent).report
    assert report.vocab_size < 300 and "requested vocab size  2,048\n" in str(report)


@pytest.mark.parametrize("is_compressed", [False, True])
def test_a_long_text_is_thinned_for_the_tokenizer(corpus, monkeypatch, is_compressed):
    """Its size on disk does not matter."""
    if is_compressed:
        corpus.write_bytes(gzip.compress(corpus.read_bytes()))
    config, progress = config_of(corpus), documents.Progress(silent)

    def sample():
        return prepared_module._training_texts(config, prepared_module.LocalFiles(config), progress)

    everything, read = sample(), prepared_module.LocalFiles(config).documents()
    assert everything == [document.text for document in read if not document.is_held_out(0.2)]
    limit = sum(map(len, everything)) // 2
    monkeypatch.setattr(prepared_module, "SAMPLE_BYTES", limit)
    found = sample()
    assert limit - max(map(len, everything)) < sum(map(len, found)) <= limit
    assert [text for text in everything if text in found] == found and found != everything[: len(found)]
    monkeypatch.setattr(prepared_module, "SAMPLE_BYTES", 1)
    assert len(sample()) == 1


def test_the_tokenizer_is_not_trained_on_validation_text(corpus, prose, tmp_path):
    prepared = prepare(config_of(corpus), silent)
    only_train = tmp_path / "train.jsonl"
    only_train.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(prepared.train, prepared.tokenizer)))
    again = prepare(config_of(only_train, validation_share=0.0), silent)
    assert tokenizer_hash(again.tokenizer) == tokenizer_hash(prepared.tokenizer)
