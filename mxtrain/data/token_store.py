"""Stores tokenized text as flat files of little-endian token ids, and maps them into memory."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from mxtrain.data.documents import Document, is_held_out
from mxtrain.data.progress import Progress, megabytes
from mxtrain.data.tokenizer import LoadedTokenizer

# Text per tokenizer call: enough to keep every core busy, and little memory.
BATCH_CHARACTERS = 2_000_000


@dataclass(frozen=True)
class TokenFile:
    """A file of token ids. Every document is ``bos ... eos``; a tokenizer without bos or eos omits that token."""

    path: Path
    dtype: str
    """"<u2" if it holds the largest id, else "<u4\""""

    count: int
    """Number of tokens"""

    sha256: str = ""
    """SHA-256 of the file's bytes, in hexadecimal digits"""

    @property
    def size(self) -> int:
        """The size in bytes that the file must have."""
        return self.count * np.dtype(self.dtype).itemsize

    def open(self) -> np.ndarray:
        """Return the tokens as a read-only array [count]."""
        if self.count == 0:  # an empty file cannot be mapped
            return np.empty(0, self.dtype)
        return np.memmap(self.path, self.dtype, mode="r", shape=(self.count,))


@dataclass
class Tally:
    """Counts of one token file."""

    documents: int = 0
    bytes: int = 0
    tokens: int = 0


def tokenize(
    documents: Iterable[Document],
    tokenizer: LoadedTokenizer,
    folder: Path,
    validation_share: float,
    expected_bytes: int,
    progress: Progress,
) -> tuple[dict[str, TokenFile], dict[str, Tally]]:
    """Write ``train.bin`` and ``validation.bin`` into ``folder``.

    Returns:
        The token files and their tallies, by split ("train" and "validation").
    """
    dtype = "<u2" if tokenizer.size <= 1 << 16 else "<u4"
    before = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    after = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    tallies = {"train": Tally(), "validation": Tally()}
    digests = {split: sha256() for split in tallies}
    paths = {split: folder / f"{split}.bin" for split in tallies}
    with paths["train"].open("wb") as train, paths["validation"].open("wb") as validation:
        files = {"train": train, "validation": validation}
        for batch in _batches(documents):
            texts = [document.text for document in batch]
            encodings = tokenizer.encoder.encode_batch_fast(texts, add_special_tokens=False)
            for document, encoding in zip(batch, encodings, strict=True):
                split = "validation" if is_held_out(document.file or document.key, validation_share) else "train"
                tokens = np.array(before + encoding.ids + after, dtype)
                content = tokens.tobytes()
                files[split].write(content)  # not ``tofile``, whose error does not say that the disk is full
                digests[split].update(content)
                tallies[split].documents += 1
                tallies[split].bytes += len(document.text.encode("utf-8"))
                tallies[split].tokens += len(tokens)
            done = sum(tally.bytes for tally in tallies.values())
            progress.tick(lambda done=done: f"tokenized {megabytes(done)} of about {megabytes(expected_bytes)}")
    files = {
        split: TokenFile(paths[split], dtype, tallies[split].tokens, digests[split].hexdigest()) for split in tallies
    }
    return files, tallies


def _batches(documents: Iterable[Document]) -> Iterator[list[Document]]:
    batch, size = [], 0
    for document in documents:
        batch.append(document)
        size += len(document.text)
        if size >= BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
