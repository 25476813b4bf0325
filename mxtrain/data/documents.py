"""Documents, the hashes that order, split and sample them, rows with text, and streams of such rows.

The hashes depend on document keys alone, so every machine gets the same order, split and sample.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from mxtrain.data.config import DataConfig
from mxtrain.errors import ConfigError

SPLITS = ("train", "validation")

OVER_LIMIT = "over max_bytes"
"""The reasons for which a source leaves out what does not fit into ``DataConfig.max_bytes`` begin with this"""

PATIENCE_ROWS = 1000

logger = logging.getLogger(__name__)


class Document(NamedTuple):
    key: str
    """Input of the hashes. Python source: the path relative to its root, with "/" on every platform. Files: the text
    itself, or a hash of its ids, because the same text may stand in several files and rows"""

    text: str | np.ndarray
    """Or its token ids, which are stored as they are"""

    split_key: str = ""
    """If not empty, it decides instead of ``key`` whether the document is held out"""

    @property
    def size(self) -> int:
        """UTF-8 bytes of the text, or bytes of the ids. Raises UnicodeEncodeError."""
        return len(self.text.encode()) if isinstance(self.text, str) else self.text.nbytes

    def is_held_out(self, validation_share: float) -> bool:
        return is_held_out(self.split_key or self.key, validation_share)


def fraction(key: str, salt: str) -> float:
    """Hash ``key`` and ``salt`` to a number in [0, 1). Different salts give independent numbers."""
    digest = blake2b(f"{salt}\0{key}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def is_held_out(key: str, validation_share: float) -> bool:
    """Return whether a document belongs to validation. A larger share contains every smaller share."""
    return fraction(key, "validation") < validation_share


class TextColumn:
    """Takes the text out of rows, which are dicts, and counts the rows without text.

    A few bad rows are common in large data. Data without any text are an error.
    """

    def __init__(self, text_key: str):
        self.text_key = text_key
        self.without_text = 0
        self._has_text = False
        self._first_problem = ""

    def text_of(self, row: dict, where: str) -> str | None:
        """Return the text of a row, or None if it has none. ``where`` names the row's file or dataset."""
        text = row.get(self.text_key)
        if isinstance(text, str):
            self._has_text = True
            return text
        self.without_text += 1
        if self.without_text == 1:
            kind = "only null" if text is None else type(text).__name__
            self._first_problem = f"data.text_key = {self.text_key!r} " + (
                f"in {where} holds {kind}, not text"
                if self.text_key in row
                else f"is not a column of {where}, which has: {', '.join(map(str, row))}"
            )
        return None

    def require_text(self) -> None:
        """Raise ConfigError if there were rows, and none of them had text."""
        if self.without_text and not self._has_text:
            raise ConfigError(self._first_problem)


class StreamedText(TextColumn):
    """The text of a row of a stream, and a warning about the first row without text, which is "".

    Raises ConfigError if none of the first PATIENCE_ROWS rows has text: a stream may have no end.
    """

    def __init__(self, text_key: str, path: str):
        super().__init__(text_key)
        self._path = path

    def __call__(self, row: dict) -> str:
        text = self.text_of(row, self._path)
        if text is None and self.without_text == 1:
            logger.warning(f"{self._path} has rows without text in {self.text_key!r}; they count as empty")
        if text is None and self.without_text == PATIENCE_ROWS:
            self.require_text()
        return text or ""


def open_stream(path: str, hf_config: str = "", split: str = "train", section: str = "training"):
    """Open a split of the Hugging Face dataset ``path``, for example "allenai/c4", without a download of the whole.

    Args:
        hf_config: the dataset's configuration, for example "en"; "" means its default.
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


def is_on_side(row: dict, text_key: str, share: float, held_out: bool) -> bool:
    """Return whether a row of a stream is held out for validation; for ``held_out = False``, whether it is not.

    A stream has no paths, so a document's text decides. Rows without text are not held out.
    """
    text = row.get(text_key)
    return held_out == (isinstance(text, str) and is_held_out(text, share))


def hub_texts(config: DataConfig) -> Iterator[str]:
    """Yield the texts of a Hugging Face dataset on which a tokenizer is trained."""
    stream, _ = open_stream(config.path, config.hf_config, "train", config.section)
    stream = filter(partial(is_on_side, text_key=config.text_key, share=config.stream_share, held_out=False), stream)
    text_of = StreamedText(config.text_key, config.path)
    yield from stream_texts(stream, text_of, f"{config.section}.dataset_path = {config.path!r}")
    text_of.require_text()


def stream_texts(rows: Iterable, text_of: Callable[[dict], str], setting: str) -> Iterator[str]:
    """Yield the text of every row. An error while reading becomes a ConfigError that begins with ``setting``."""
    with raised_as(f"{setting} cannot be read further"):
        yield from map(text_of, rows)


def megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"


def one_line(error: BaseException) -> str:
    """Return the message of an error in one line, or the error's type if it has no message."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def raised_as(problem: str) -> Iterator[None]:
    """Turn errors into a ConfigError that begins with ``problem``: networks and readers raise many types."""
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"{problem}: {type(error).__name__}: {one_line(error)}") from error
