import bz2
import gzip
import io
import json
import lzma
import tracemalloc

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset

from mxtrain.data import DataConfig
from mxtrain.data.documents import LocalFiles, fraction, is_held_out, open_text, split_lines
from mxtrain.errors import ConfigError

KEYS = [f"stdlib/module_{i}.py" for i in range(4000)]


def test_fraction_is_the_same_on_every_machine():
    # Fixed values: another hash would move documents between training and validation of published runs.
    assert fraction("stdlib/json/decoder.py", "validation") == 0.8746483661446574
    held_out = [key for key in KEYS[:50] if is_held_out(key, 0.05)]
    assert held_out == [f"stdlib/module_{number}.py" for number in (27, 30, 33, 45, 49)]


def test_a_larger_validation_share_contains_a_smaller_one():
    small, large = ({key for key in KEYS if is_held_out(key, share)} for share in (0.1, 0.2))
    assert abs(len(small) / len(KEYS) - 0.1) < 0.02
    assert small < large
    assert not any(is_held_out(key, 0.0) for key in KEYS)


# Files


def documents(path, **fields) -> list[str]:
    found = list(LocalFiles(DataConfig(dataset="files", path=str(path), **fields)).documents())
    assert all(document.key == document.text for document in found)
    return [document.text for document in found]


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


def write_jsonl(path, texts, key="text"):
    path.write_text("".join(json.dumps({"id": i, key: text}) + "\n" for i, text in enumerate(texts)))
    return path


def test_jsonl_without_empty_rows(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["one", "", None, "two\nlines", " \n"])
    source = LocalFiles(DataConfig(dataset="files", path=str(file)))
    assert [document.text for document in source.documents()] == ["one", "two\nlines"]
    assert source.dropped == {"empty": 2, "without text": 1}
    list(source.documents())
    assert source.dropped == {"empty": 2, "without text": 1}, "every reading counts anew"
    assert source.listing == [(str(file), file.stat().st_size, file.stat().st_mtime_ns)]


def test_of_parquet_only_the_text_is_read(tmp_path):
    """datasets refuses a shard without rows, some types, and images that cannot be decoded."""
    features = {"text": {"dtype": "string", "_type": "Value"}, "image": {"_type": "Image"}, "new": {"_type": "Newer"}}
    table = pa.table(
        {
            "text": pa.array(["one", None, "two"], pa.large_string()),
            "meta": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int64())),
            "image": [{"bytes": b"no image", "path": None}] * 3,
            "new": [1, 2, 3],
        }
    ).replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table.slice(0, 0), tmp_path / "a.parquet")
    pq.write_table(table, tmp_path / "b.parquet")
    pq.write_table(pa.table({"other": ["one", "two"]}), tmp_path / "c.parquet")
    assert documents(tmp_path / "c.parquet", text_key="other") == ["one", "two"]
    source = LocalFiles(DataConfig(dataset="files", path=str(tmp_path)))
    assert [document.text for document in source.documents()] == ["one", "two"]
    assert source.dropped == {"without text": 3}


def test_a_saved_dataset(tmp_path):
    Dataset.from_dict({"id": [1, 2], "text": ["one", "two"]}).save_to_disk(tmp_path / "saved", num_shards=2)
    assert documents(tmp_path / "saved") == ["one", "two"]


def test_a_folder_is_read_recursively_in_order_without_hidden_files(tmp_path):
    for name in ("b.txt", "a.md", "sub/c.py", ".hidden.txt", ".git/config"):
        path = tmp_path / "text" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name}\n")
    expected = ["a.md\n", "b.txt\n", "sub/c.py\n"]
    assert documents(tmp_path / "text") == expected


def test_a_row_is_what_it_says_wherever_it_stands_in_a_large_file(tmp_path):
    """The datasets library infers types from the first 10 MB: it made dates of texts, and text of numbers."""
    rows = [{"text": "x" * 4000, "url": None}] * 3000
    rows += [{"text": "2020-01-01", "url": "u"}, {"text": 5, "url": 0.5}, {"text": "end", "more": {"a": 1}}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = LocalFiles(DataConfig(dataset="files", path=str(tmp_path / "a.jsonl")))
    assert [document.text for document in source.documents()][3000:] == ["2020-01-01", "end"]
    assert source.dropped == {"without text": 1}


def test_json_as_it_comes(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b"")
    (tmp_path / "b.jsonl").write_bytes('\ufeff{"text": "marked"}\r\n\n  \n{"text": "last"}'.encode())
    (tmp_path / "c.json").write_text('\n[{"text": "one"},\n {"text": "two"}]\n')
    (tmp_path / "d.jsonl").write_text('{"text": "half \\ud83d"}\n{"text": "whole \\ud83d\\ude00"}\n')
    source = LocalFiles(DataConfig(dataset="files", path=str(tmp_path)))
    assert [d.text for d in source.documents()] == ["marked", "last", "one", "two", "whole \U0001f600"]
    assert source.dropped == {"half of a surrogate pair": 1}


def test_globs_and_names_with_pattern_characters(tmp_path):
    write_jsonl(tmp_path / "part[1].jsonl", ["odd name"])
    (tmp_path / "readme.txt").write_text("not this one")
    assert documents(tmp_path / "part[1].jsonl") == ["odd name"]
    assert documents(tmp_path / "*.jsonl") == ["odd name"]
    (tmp_path / "x[2]").mkdir()
    (tmp_path / "x[2]" / "a.txt").write_text("in an odd folder")
    assert documents(tmp_path / "x[2]") == ["in an odd folder"]


def test_copies_of_a_held_out_text_are_held_out_too_and_stay_so_when_rows_are_added(tmp_path):
    rows = [f"text {i}" for i in range(100)]

    def split(path):
        config = DataConfig(dataset="files", path=str(path))
        held_out = {d.text for d in LocalFiles(config).documents() if d.is_held_out(0.2)}
        return held_out, {d.text for d in LocalFiles(config).documents() if not d.is_held_out(0.2)}

    write_jsonl(tmp_path / "a.jsonl", rows)
    held_out, trained = split(tmp_path / "a.jsonl")
    assert 5 < len(held_out) < 40 and len(trained) == 100 - len(held_out)
    write_jsonl(tmp_path / "a.jsonl", ["a new first row", *rows])
    write_jsonl(tmp_path / "b.jsonl", reversed(rows))
    later_held_out, later_trained = split(tmp_path)
    assert held_out <= later_held_out and trained <= later_trained and not later_held_out & later_trained


def test_max_bytes_counts_utf8(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["éé", "éé", "é"])
    assert len(documents(file, max_bytes=8)) == 2
    assert len(documents(file, max_bytes=7)) == 1  # reading stops, although the third would fit


def test_documents_longer_than_max_bytes_are_left_out_and_counted(tmp_path):
    file = write_jsonl(tmp_path / "a.jsonl", ["a" * 9, "one", "two", "a" * 9, "four", "three", "a"])
    source = LocalFiles(DataConfig(dataset="files", path=str(file), max_bytes=8))
    for _ in range(2):  # the tokenizer's text, and the run's
        assert [document.text for document in source.documents()] == ["one", "two"]
        assert source.dropped == {"over max_bytes": 2, "over max_bytes and all after it": 1}


def test_a_long_text_becomes_several_documents(tmp_path):
    text = "".join(f"line {i}\n" for i in range(20_000))
    (tmp_path / "long.txt").write_text(text)
    found = documents(tmp_path / "long.txt")
    assert len(found) == 4
    assert "".join(found) == text
    assert all(document.endswith("\n") for document in found)


def test_the_pieces_of_a_file_are_on_one_side_unless_it_is_the_only_file(tmp_path):
    share, sides = 0.3, []
    for number in range(12):
        line = f"file {number}, which has about four pieces of sixty-four thousand letters\n"
        (tmp_path / f"{number}.txt").write_text("".join(f"{i} {line}" for i in range(3000)))
    found = list(LocalFiles(DataConfig(dataset="files", path=str(tmp_path))).documents())
    for number in range(12):
        own = [document for document in found if f"file {number}," in document.text]
        sides.append({document.is_held_out(share) for document in own})
        assert len(own) > 2 and len(sides[-1]) == 1
    assert {True} in sides and {False} in sides
    alone = LocalFiles(DataConfig(dataset="files", path=str(tmp_path / "0.txt")))
    assert all(document.split_key == "" for document in alone.documents())


def test_a_missing_path_is_shown_whole(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=f"'nowhere' does not exist .*: {tmp_path}/nowhere; correct it, or name"):
        documents("nowhere")


# Text, compressed or not, piece by piece


@pytest.mark.parametrize(
    "text, pieces",
    [
        ("", [""]),
        ("abc", ["abc"]),
        ("ab\ncd\nef", ["ab\ncd\n", "ef"]),
        ("a\nbbbbbbbbbb\nc\nd", ["a\n", "bbbbbbbbbb\n", "c\nd"]),
        ("aaaaaaaaaa", ["aaaaaaaaaa"]),
        ("a\u2028bcd\nef", ["a\u2028bcd\n", "ef"]),
    ],
)
def test_split_lines_cuts_after_line_ends(text, pieces):
    assert list(split_lines(io.StringIO(text, newline="\n"), 6)) == pieces


PACKED = {"": bytes, ".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def test_the_suffix_says_how_a_file_is_compressed_and_all_line_ends_become_one(tmp_path):
    for suffix, compress in PACKED.items():
        for text in ("one\r\ntwo\rthree\n é\u2028", "", "\ufeffafter a byte order mark \ufeff"):
            (tmp_path / f"a.txt{suffix}").write_bytes(compress(text.encode()))
            with open_text(tmp_path / f"a.txt{suffix}") as file:
                expected = text.replace("\r\n", "\n").replace("\r", "\n").removeprefix("\ufeff")
                assert file.read() == expected, (suffix, text)


def test_memory_does_not_grow_with_the_file(tmp_path):
    size, line = 20_000_000, b"a line of sixty-four characters, as in a typical text of a book\n"
    path = tmp_path / "large.txt.gz"
    path.write_bytes(gzip.compress(line * (size // len(line)), compresslevel=1))
    tracemalloc.start()
    count = sum(1 for _ in LocalFiles(DataConfig(dataset="files", path=str(path))).documents())
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count > size // (1 << 16) and peak < size // 10
