import os
from itertools import count
from types import SimpleNamespace

import datasets
import pytest

from mxtrain.data import DataConfig, prepared
from mxtrain.data.documents import is_held_out
from mxtrain.data.hub import PATIENCE_ROWS, StreamedText, hold_out, open_stream, stream_texts
from mxtrain.errors import ConfigError


def test_a_stream_is_opened_with_the_settings(monkeypatch):
    calls = []

    def load_dataset_builder(path, name):
        calls.append((path, name))
        return SimpleNamespace(as_streaming_dataset=lambda split: [split], hash="c0ffee")

    monkeypatch.setattr(datasets, "load_dataset_builder", load_dataset_builder)
    assert open_stream("allenai/c4", "en", "validation") == (["validation"], "c0ffee")
    assert open_stream("some/set") == (["train"], "c0ffee")
    assert calls == [("allenai/c4", "en"), ("some/set", None)]


def test_a_stream_of_local_files_has_another_version_when_they_change(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": "a"}\n')
    rows, version = open_stream(str(tmp_path))
    assert list(stream_texts(rows, "text", "a")) == ["a"]
    assert version and open_stream(str(tmp_path))[1] == version
    file.write_text('{"text": "b"}\n')
    os.utime(file, (1, 1))
    assert open_stream(str(tmp_path))[1] != version


def test_a_dataset_that_cannot_be_opened_is_a_config_error(monkeypatch):
    def fail(*args, **options):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset_builder", fail)
    message = r"training.dataset_path = 'a/b' \(data.hf_config = 'en', split 'train'\) .*ConnectionError: no network"
    with pytest.raises(ConfigError, match=message):
        open_stream("a/b", "en")
    with pytest.raises(ConfigError, match="validation.dataset = 'hf' needs validation.dataset_path"):
        open_stream("", section="validation")


def test_texts_and_a_missing_text_column():
    rows = [{"text": "a"}, {"text": None}, {"text": "b"}]
    assert list(stream_texts(rows, "text", "a/b")) == ["a", "", "b"]
    with pytest.raises(ConfigError, match="data.text_key = 'content' is not a column of a/b, which has: text"):
        list(stream_texts(rows, "content", "a/b"))


def test_a_few_rows_without_text_are_empty_with_one_warning(caplog):
    rows = [{"text": "a"}, {"body": "b"}, {"text": 3}] * 2 * PATIENCE_ROWS
    text_of = StreamedText("text", "a/b")
    assert [text_of(row) for row in rows] == ["a", "", ""] * 2 * PATIENCE_ROWS
    (line,) = [record.getMessage() for record in caplog.records]
    assert line == "a/b has rows without text in 'text'; they count as empty"


def test_an_endless_stream_without_text_is_a_config_error():
    with pytest.raises(ConfigError, match="data.text_key = 'text' in a/b holds int, not text"):
        list(stream_texts(({"text": i} for i in count()), "text", "a/b"))


def test_a_stream_that_breaks_off_is_a_config_error():
    def rows():
        yield {"text": "a"}
        raise ConnectionError("reset\nby peer")

    message = "^validation.dataset_path = 'a/b' cannot be read further: ConnectionError: reset by peer$"
    with pytest.raises(ConfigError, match=message):
        list(stream_texts(rows(), "text", "a/b", "validation"))


def test_rows_without_text_are_on_the_side_of_training():
    """They count as empty there, with a warning: a wrong data.text_key must not end a stream in silence."""
    rows = [{"text": f"text {i}"} for i in range(50)] + [{"text": None}, {"body": "b"}]
    stream = datasets.IterableDataset.from_generator(lambda: iter(rows))
    sides = [list(hold_out(stream, "text", 0.3, held_out)) for held_out in (False, True)]
    assert sides[1] == [row for row in rows[:50] if is_held_out(row["text"], 0.3)] and len(sides[1]) > 5
    assert sides[0] == [row for row in rows if row not in sides[1]]


def test_a_tokenizer_reads_the_stream_without_the_share_that_is_held_out_of_it(monkeypatch):
    """``data.validation_share`` is of files."""
    texts = [f"text {i}" for i in range(50)]
    stream = datasets.IterableDataset.from_generator(lambda: ({"text": text} for text in texts))
    monkeypatch.setattr(prepared, "open_stream", lambda *_: (stream, None))
    for share in (0.0, 0.3):
        config = DataConfig(dataset="hf", path="a/b", validation_share=0.6, stream_share=share)
        assert list(prepared._hub_texts(config)) == [text for text in texts if not is_held_out(text, share)]
