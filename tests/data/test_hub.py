import os
from itertools import count
from types import SimpleNamespace

import datasets
import pytest

from mxtrain.data.hub import PATIENCE_ROWS, StreamedText, open_stream, stream_texts
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
    stream = open_stream(str(tmp_path))
    assert list(stream_texts(stream.rows, "text", "a")) == ["a"]
    assert stream.version and open_stream(str(tmp_path)).version == stream.version
    file.write_text('{"text": "b"}\n')
    os.utime(file, (1, 1))
    assert open_stream(str(tmp_path)).version != stream.version


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
