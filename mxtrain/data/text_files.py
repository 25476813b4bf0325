"""Reads text files piece by piece, so that a file may be larger than the memory."""

import bz2
import gzip
import lzma
import re
from collections.abc import Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import TextIO


def _open_zstd(file: Path, mode: str, encoding: str) -> TextIO:
    import pyarrow

    return TextIOWrapper(pyarrow.input_stream(str(file), compression="zstd"), encoding=encoding)


# First bytes of a compressed file -> the function that opens it.
COMPRESSIONS = {
    rb"\x1f\x8b": gzip.open,
    rb"BZh[1-9](1AY&SY|\x17rE8P\x90)": bz2.open,  # the second one: an empty text
    rb"\xfd7zXZ\x00": lzma.open,
    rb"\x28\xb5\x2f\xfd": _open_zstd,
}

READ_CHARACTERS = 1 << 20


def open_text(file: Path) -> TextIO:
    """Open a UTF-8 text file, plain or compressed with gzip, bzip2, xz or zstd. Every line end is read as "\\n".

    A byte order mark at the start is no text.
    """
    with file.open("rb") as raw:
        start = raw.read(16)
    opener = next((opener for magic, opener in COMPRESSIONS.items() if re.match(magic, start)), open)
    return opener(file, "rt", encoding="utf-8-sig")


def split_lines(file: TextIO, size: int) -> Iterator[str]:
    """Cut the text of ``file`` after line ends into pieces of at most ``size`` characters. A longer line stays whole.

    The last piece may be empty.
    """
    text, start = "", 0
    while True:
        if len(text) - start <= size:
            more = file.read(max(size, READ_CHARACTERS))
            if not more:
                yield text[start:]
                return
            text, start = text[start:] + more, 0
            continue
        end = text.rfind("\n", start, start + size) + 1 or text.find("\n", start + size) + 1
        if not end:
            text, start = text[start:] + file.readline(), 0
            end = len(text)
        yield text[start:end]
        start = end
