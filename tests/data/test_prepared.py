import bz2
import csv
import gzip
import io
import json
import os
import shutil
import struct
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from filelock import FileLock
from pyarrow import feather

from mxtrain.data import DataConfig, prepare
from mxtrain.data import prepared as prepared_module
from mxtrain.data.documents import is_held_out
from mxtrain.data.prepared import TextReport, differences
from mxtrain.data.token_files import token_dtype
from mxtrain.data.tokenizer import EOS_TOKEN, load_tokenizer, tokenizer_hash
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


def texts(tokens, tokenizer) -> list[str]:
    decoded = load_tokenizer(tokenizer).encoder.decode(tokens[:], skip_special_tokens=False)
    return [part.removeprefix("<|begin_of_text|>") for part in decoded.split("<|end_of_text|>")[:-1]]


@pytest.mark.parametrize("processes", [1, 3])
def test_both_splits_hold_their_documents_in_order(corpus, prose, cache, monkeypatch, processes):
    """In rows of 5,000 characters, which one process tokenizes, or several."""
    monkeypatch.setattr(prepared_module, "BATCH_CHARACTERS", 5000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(processes)))
    environment = os.environ
    lines, all_texts = [], [prose(i) for i in range(30)] + [f"a{EOS_TOKEN[:-1]}\u2028é"]
    with corpus.open("a") as file:
        file.write(json.dumps({"text": all_texts[-1]}) + "\n")
    prepared = prepare(config_of(corpus), lines.append)
    assert os.environ is environment
    for split, held_out in ((prepared.train, False), (prepared.validation, True)):
        expected = [text for text in all_texts if is_held_out(text, 0.2) == held_out]
        assert texts(split, prepared.tokenizer) == expected and len(expected) > 2
        assert (split[:1], split[len(split) - 1 :]) == (0, 1) and split.dtype == "<u2"
    report = prepared.report
    assert (report.files, report.documents, report.validation_documents) == (1, 31, len(expected))
    assert report.bytes == sum(len(text.encode()) for text in all_texts)
    assert (report.train_tokens, report.validation_tokens) == (len(prepared.train), len(prepared.validation))
    assert report.vocab_size == report.requested_vocab_size == 300
    assert report.folder == str(prepared.folder) and prepared.tokenizer.is_relative_to(cache)
    assert {path.name for path in prepared.folder.iterdir()} == {"prepared.json", "tokenizer", "tokens"}
    assert lines[0].startswith(f"preparing dataset 'files' in {prepared.folder}, or waiting for another process")
    assert lines[-1] == "prepared dataset 'files'"
    assert f"tokenizing {report.bytes / 1e6:.1f} MB of text in {processes} process(es)" in lines


def test_the_hash_of_a_long_text_is_that_of_its_parts(corpus, monkeypatch):
    """Fixed values: checkpoints name their text by them."""
    whole = prepare(config_of(corpus), silent)
    assert whole.identity["train"].startswith("e7ccb233d0ff")
    monkeypatch.setattr(prepared_module, "BATCH_CHARACTERS", 2500)
    monkeypatch.setattr(prepared_module, "PART_BYTES", 3000)
    monkeypatch.setattr(prepared_module, "CACHE_VERSION", 0)
    parts = prepare(config_of(corpus), silent)
    assert np.array_equal(parts.train[:], whole.train[:])
    assert parts.identity["train"].startswith("e1672a20ad47") and parts.identity["validation"].startswith(
        "5ea2aedafc4b"
    )


def test_ids_are_stored_in_the_narrowest_type_that_holds_them():
    assert [token_dtype(size) for size in (300, 1 << 16, (1 << 16) + 1)] == ["<u2", "<u2", "<u4"]


# Kinds of files


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
    ("RC_2023-01.jsonl.zst", lambda rows: zstd(json_lines(rows))),
    ("a.json.bz2", lambda rows: bz2.compress(json_lines(rows))),
    ("a.csv", values(",")),
    ("a.tsv.gz", lambda rows: gzip.compress(values("\t")(rows))),
    ("a.feather", arrow(lambda out, table: feather.write_feather(table, out, "lz4", 7))),
    ("a.arrow", arrow(file)),
    ("b.arrow", arrow(stream)),
]


def test_the_same_rows_in_a_file_of_another_kind_are_the_same_tokens(corpus, tmp_path):
    rows = [json.loads(line) | {"id": i} for i, line in enumerate(corpus.read_text().splitlines())]
    rows[3]["text"] = 'quoted "text",\n\n\twith a tab, ' + "and long, " * 20_000
    corpus.write_bytes(json_lines(rows))
    expected = prepare(config_of(corpus), silent)
    assert rows[3]["text"] in texts(expected.train, expected.tokenizer)
    for name, write in KINDS:
        (tmp_path / name).write_bytes(write(rows))
        prepared = prepare(config_of(tmp_path / name, tokenizer_path=str(expected.tokenizer)), silent)
        assert prepared.identity == expected.identity, name


# The cache


def same(one, two) -> bool:
    return (one.identity, one.report, one.folder, one.tokenizer) == (
        two.identity, two.report, two.folder, two.tokenizer
    )  # fmt: skip


def test_a_second_call_loads_and_an_edited_file_or_a_changed_setting_is_built_again(corpus, prose, monkeypatch):
    first, build = prepare(config_of(corpus), silent), prepared_module._build
    monkeypatch.setattr(prepared_module, "_build", None)
    assert same(prepare(config_of(corpus), None), first)
    monkeypatch.setattr(prepared_module, "_build", build)
    assert prepare(config_of(corpus, seed=7), silent).tokenizer != first.tokenizer
    with corpus.open("a") as file:
        file.write(json.dumps({"text": prose(99)}) + "\n")
    second = prepare(config_of(corpus), silent)
    assert second.report.documents == 31 and second.identity["train"] != first.identity["train"]
    os.utime(corpus, ns=(0, 0))
    third = prepare(config_of(corpus), silent)
    monkeypatch.setattr(prepared_module, "CACHE_VERSION", 0)
    fourth = prepare(config_of(corpus), silent)
    assert len({result.folder for result in (first, second, third, fourth)}) == 4
    assert second.identity == third.identity == fourth.identity


def test_a_process_waits_for_another_one_and_takes_its_text(corpus):
    first, lines = prepare(config_of(corpus), silent), []
    away, lock = first.folder.with_name("away"), FileLock(f"{first.folder}.lock")
    first.folder.rename(away)
    lock.acquire()

    def note(line: str) -> None:
        lines.append(line)
        away.rename(first.folder)
        lock.release()

    assert same(prepare(config_of(corpus), note), first)
    assert lines == [f"preparing dataset 'files' in {first.folder}, or waiting for another process"]
    assert [path.name for path in first.folder.parent.iterdir() if path.is_dir()] == [first.folder.name]


def test_what_a_killed_process_left_is_removed_and_a_folder_without_report_replaced(corpus):
    first = prepare(config_of(corpus), silent)
    (first.folder / "prepared.json").unlink()
    left = first.folder.with_name(f"{first.folder.name}.building-0123")
    left.mkdir()
    assert same(prepare(config_of(corpus), silent), first) and not left.exists()


DAMAGES = [
    (
        lambda folder: shutil.rmtree(folder / "tokens"),
        "cannot be read \\('shards'\\); remove the folder",
    ),
    (lambda folder: (folder / "prepared.json").write_text("[]"), "cannot be read .*prepared.json holds list"),
    (lambda folder: (folder / "prepared.json").write_text('{"report": {}}'), "cannot be read .*TextReport"),
    (lambda folder: (folder / "tokenizer/tokenizer.json").write_text("{}"), "is not the tokenizer of the prepared"),
]


@pytest.mark.parametrize("damage, message", DAMAGES)
def test_a_damaged_text_is_one_line(corpus, damage, message):
    folder = prepare(config_of(corpus), silent).folder
    damage(folder)
    for config in (config_of(corpus), DataConfig(dataset="files", prepared=folder.name)):
        with pytest.raises(ConfigError, match=message) as caught:
            prepare(config, silent)
        assert "\n" not in str(caught.value)


def test_a_chosen_text_is_loaded_without_its_source(corpus, tmp_path, monkeypatch):
    first = prepare(config_of(corpus), silent)
    corpus.unlink()
    by_name = DataConfig(dataset="files", prepared=first.folder.name)
    by_path = DataConfig(dataset="files", prepared=str(first.folder))
    assert same(prepare(by_name, silent), first) and same(prepare(by_path, silent), first)
    with pytest.raises(ConfigError, match="is a text of training.dataset = 'files', not 'python'; set"):
        prepare(DataConfig(prepared=first.folder.name), silent)
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=f"data.prepared = '{first.folder.name}' names '.*/empty/files"):
        prepare(by_name, silent)


# Tokenizers


def test_an_existing_tokenizer_is_used_and_its_changes_are_noticed(corpus, tmp_path):
    trained, folder = prepare(config_of(corpus), silent), tmp_path / "tokenizer"
    config = config_of(corpus, vocab_size=350, tokenizer_path=str(folder))
    with pytest.raises(ConfigError, match="model.hf_assets_path = .* is not a folder"):
        prepare(config, silent)
    shutil.copytree(trained.tokenizer, folder)
    both = prepare(config, silent)
    assert both.tokenizer == folder and both.identity == trained.identity
    assert (both.report.vocab_size, both.report.requested_vocab_size) == (300, 0)
    (folder / "tokenizer_config.json").rename(folder / "special_tokens_map.json")
    again = prepare(config, silent)
    (folder / "special_tokens_map.json").write_text('{"eos_token": "<|end_of_text|>"}')
    ends = prepare(config, silent)
    assert len(ends.train) < len(again.train) == len(both.train) and len({p.folder for p in (both, again, ends)}) == 3
    larger = prepare(config_of(corpus, vocab_size=350), silent)
    shutil.copy(larger.tokenizer / "tokenizer.json", folder)
    assert len(prepare(config, silent).train) < len(ends.train)
    with pytest.raises(ConfigError, match="model.hf_assets_path = '.*tokenizer' is not the tokenizer of the prepared"):
        prepare(DataConfig(dataset="files", prepared=ends.folder.name), silent)


def test_a_stream_trains_a_tokenizer_and_is_not_tokenized(prose):
    opened = []

    def stream():
        opened.append(True)
        return (prose(i) for i in range(10))

    config = DataConfig(dataset="elsewhere", vocab_size=300)
    prepared = prepare(config, silent, stream=stream)
    assert load_tokenizer(prepared.tokenizer).size == 300
    assert prepared.train is None and prepared.validation is None and prepared.report.streamed
    assert same(prepare(config, silent, stream=stream), prepared) and len(opened) == 1
    existing = DataConfig(dataset="elsewhere", vocab_size=0, tokenizer_path=str(prepared.tokenizer))
    assert prepare(existing, silent, stream=stream).report.vocab_size == 300
    assert len(opened) == 1  # an existing tokenizer opens no stream


def test_a_vocabulary_smaller_than_requested_is_reported(tmp_path):
    (tmp_path / "poor.txt").write_text("abc abc\n" * 9)
    report = prepare(config_of(tmp_path / "poor.txt", vocab_size=2048, validation_share=0.0), silent).report
    assert report.vocab_size < 300 and "requested vocab size  2,048\n" in str(report)


def test_a_long_text_is_thinned_for_the_tokenizer(corpus, monkeypatch):
    config = config_of(corpus)

    def sample():
        return prepared_module._training_texts(config, prepared_module.LocalFiles(config))

    everything, read = sample(), prepared_module.LocalFiles(config).documents()
    assert everything == [document.text for document in read if not document.is_held_out(0.2)]
    limit = sum(map(len, everything)) // 2
    monkeypatch.setattr(prepared_module, "SAMPLE_BYTES", limit)
    found = sample()
    assert limit - max(map(len, everything)) < sum(map(len, found)) <= limit
    assert [text for text in everything if text in found] == found and found != everything[: len(found)]
    monkeypatch.setattr(prepared_module, "SAMPLE_BYTES", 1)
    assert len(sample()) == 1


def test_the_tokenizer_is_not_trained_on_validation_text(corpus, tmp_path):
    prepared = prepare(config_of(corpus), silent)
    only_train = tmp_path / "train.jsonl"
    only_train.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts(prepared.train, prepared.tokenizer)))
    again = prepare(config_of(only_train, validation_share=0.0), silent)
    assert tokenizer_hash(again.tokenizer) == tokenizer_hash(prepared.tokenizer)


def test_report_of_a_tokenized_text():
    counts = {"files": 1790, "documents": 1717, "bytes": 30_500_000, "train_tokens": 10_013_521}
    dropped = {"duplicate": 19, "machine-made": 22, "unreadable": 0}
    report = TextReport("python", "/cache/python-1", 2048, 4096, **counts, dropped=dropped)
    report = replace(report, separators="begins with '<s>'")
    assert str(report).splitlines() == [
        "dataset               python",
        "folder                /cache/python-1",
        "vocab size            2,048",
        "requested vocab size  4,096",
        "files                 1,790",
        "documents             1,717",
        "bytes                 30,500,000",
        "train tokens          10,013,521",
        "dropped               19 duplicate, 22 machine-made",
        "separators            begins with '<s>'",
    ]
    files = "1,717 documents, 30.5 MB"
    assert report.line == f"{files}; each document begins with '<s>'; left out: 19 duplicate, 22 machine-made"


def test_differences_name_the_parts():
    one, two = {"tokenizer": "a" * 64, "train": "b" * 64}, {"tokenizer": "c" * 64}
    assert (
        differences(one, two)
        == "tokenizer cccccccccccc instead of aaaaaaaaaaaa, training text none instead of bbbbbbbbbbbb"
    )
