"""Streams Hugging Face datasets as training text, without downloading them whole."""

import logging
from collections.abc import Iterable, Iterator
from functools import partial

from mxtrain.data.documents import TextColumn, is_held_out, raised_as
from mxtrain.errors import ConfigError

logger = logging.getLogger(__name__)

PATIENCE_ROWS = 1000
"""A stream that starts with this many rows without text is an error: it may have no end"""


def open_stream(path: str, hf_config: str = "", split: str = "train", section: str = "training"):
    """Open the Hugging Face dataset ``path`` for streaming.

    Args:
        path: the dataset's id, for example "allenai/c4".
        hf_config: the dataset's configuration, for example "en"; "" means its default.
        split: "train" or "validation".
        section: TOML section of ``path``, for error messages.

    Returns:
        The rows, a ``datasets.IterableDataset``, and their version: the commit of a dataset on the hub, or a hash of
        local files' names and times; None where it is not known.

    Raises:
        ConfigError: ``path`` is empty, or the dataset, configuration or split cannot be opened.
    """
    import datasets

    if not path:
        raise ConfigError(
            f"{section}.dataset = 'hf' needs {section}.dataset_path: the id of a Hugging Face dataset, "
            "for example 'allenai/c4' (with data.hf_config = 'en')"
        )
    settings = f"(data.hf_config = {hf_config!r}, split {split!r})"
    with raised_as(f"{section}.dataset_path = {path!r} {settings} cannot be opened as a Hugging Face dataset"):
        builder = datasets.load_dataset_builder(path, name=hf_config or None)
        return builder.as_streaming_dataset(split=split), builder.hash


def hold_out(stream, text_key: str, share: float, held_out: bool):
    """Return the documents of a ``datasets.IterableDataset`` that are held out for validation, or all others.

    A stream has no paths, so a document's text decides: equal documents are on the same side. Rows without text in the
    column ``text_key`` are not held out. With a share of 0 the stream is returned as it is.
    """
    return stream.filter(partial(_is_on_side, text_key=text_key, share=share, held_out=held_out)) if share else stream


def _is_on_side(row: dict, text_key: str, share: float, held_out: bool) -> bool:
    text = row.get(text_key)
    return held_out == (isinstance(text, str) and is_held_out(text, share))


class StreamedText(TextColumn):
    """Called with a row of a stream, returns its text: "" for a row without text, with a warning for the first one.

    Raises ConfigError if none of the first PATIENCE_ROWS rows has text.
    """

    def __init__(self, text_key: str, path: str):
        super().__init__(text_key)
        self._path = path

    def __call__(self, row: dict) -> str:
        text = self.text_of(row, self._path)
        if text is not None:
            return text
        if self.without_text == 1:
            logger.warning(f"{self._path} has rows without text in {self.text_key!r}; they count as empty")
        if self.without_text == PATIENCE_ROWS:
            self.require_text()
        return ""


def stream_texts(stream, text_key: str, path: str, section: str = "training") -> Iterator[str]:
    """Yield the text of every row.

    Raises:
        ConfigError: no row has a string in the column ``text_key``, or the stream breaks off.
    """
    text_of = StreamedText(text_key, path)
    for row in readable(stream, f"{section}.dataset_path = {path!r}"):
        yield text_of(row)
    text_of.require_text()


def readable(rows: Iterable, setting: str) -> Iterator:
    """Yield ``rows``. An error while reading them becomes a ConfigError that begins with ``setting``."""
    with raised_as(f"{setting} cannot be read further"):
        yield from rows
