"""Token ids that are read where they lie: Megatron's ``.bin`` beside an ``.idx`` file, and flat files, of ids only."""

import os
import struct
import sys
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import SPLITS, LocalFiles, require_ids
from mxtrain.errors import ConfigError, one_line

# megatron/core/datasets/indexed_dataset.py: magic, version, dtype, number of sequences and of document ends; then the
# sequences' lengths (int32) and their places in the .bin file (int64, bytes), and the documents' ends (int64).
HEADER, START = struct.Struct("<9sQBQQ"), (b"MMIDIDX\x00\x00", 1)
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

PART_BYTES = 1 << 28
"""Longer texts are hashed in parts"""
LOOKED_AT = 1 << 16
PIECE = 1 << 22
"""Tokens read at a time"""


class Tokens:
    """Token ids in memory-mapped arrays, which follow each other. ``tokens[begin:end]`` is an array of them.

    The ``dtype`` of prepared text is "<u2" if it holds the largest id, else "<u4". ``sha256`` is the hash of the ids'
    bytes; of a text in several parts, that of their hashes.
    """

    def __init__(self, pieces: Iterable[np.ndarray], dtype: str, sha256: str):
        self._ids = pa.chunked_array([*map(pa.array, pieces)], pa.from_numpy_dtype(dtype))
        self.dtype, self.sha256 = dtype, sha256

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop, _ = part.indices(len(self))
        return self._ids.slice(start, stop - start).to_numpy()

    def hashed(self, ends: Iterable[int]) -> "Tokens":
        """Return the tokens with their hash. The parts of the text end at ``ends``, of which the last is the length."""
        parts = [sha256(self[begin:end]).hexdigest() for begin, end in pairwise([0, *ends])]
        return Tokens(self._ids.chunks, self.dtype, joined(parts))


def token_dtype(vocabulary: int) -> str:
    """Return the narrowest type that holds the largest id."""
    return "<u2" if vocabulary <= 1 << 16 else "<u4"


def joined(hashes: list[str]) -> str:
    """Return the hash of a text in parts."""
    return hashes[0] if len(hashes) == 1 else sha256("".join(hashes).encode()).hexdigest()


def open_parts(folder: Path, facts: dict) -> Tokens:
    """Return the tokens that ``link_tokens`` has described. Raises OSError, ValueError and KeyError."""
    dtype, parts = np.dtype(facts["dtype"]), [part for part in facts["shards"] if part["count"]]  # none maps no byte
    pieces = [np.memmap(folder / p["name"], dtype, "r", p["start"] * dtype.itemsize, (p["count"],)) for p in parts]
    return Tokens(pieces, facts["dtype"], facts["sha256"])


def link_tokens(source: LocalFiles, folder: Path, config: DataConfig) -> tuple[dict[str, dict], dict[str, int]]:
    """Link a source's files into ``folder``, and read their tokens, on all cores, for their hashes.

    The last documents of every Megatron file and the last tokens of every flat file are held out. Returns what
    ``open_parts`` takes by split, and counts of a ``TextReport``.
    """
    found, hashes, dtypes = {split: [] for split in SPLITS}, {split: [] for split in SPLITS}, set()
    counts = Counter()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        for number, path in enumerate(source.token_files):
            room = config.max_bytes - counts["bytes"] if config.max_bytes else sys.maxsize
            try:
                dtype, documents = _layout(path, source.vocabulary)
                if not path.stat().st_size:
                    source.dropped["empty"] += 1
                    continue
                link = folder / f"{number}-{path.name}"
                link.symlink_to(path)
                size = np.dtype(dtype).itemsize
                count = min(path.stat().st_size, room) // size
                end = _end_of_training(count, size, documents, config.validation_share)
                for split, span in {"train": (0, end), "validation": (end, count)}.items():
                    parts = _parts(link.name, *span, PART_BYTES // size)
                    hashes[split] += pool.map(partial(_hash, path, dtype, source.vocabulary), parts)
                    found[split] += parts
                    counts.update({"bytes": size * (span[1] - span[0]), f"{split}_tokens": span[1] - span[0]})
            except (OSError, ValueError) as error:
                raise ConfigError(f"{source.setting}: cannot read {path} as token ids: {one_line(error)}") from error
            dtypes.add(dtype)
            before, begun = np.searchsorted(documents, [end * size, count * size]).tolist()
            counts.update({"documents": begun, "validation_documents": begun - before})
    if not dtypes:
        raise ConfigError(f"{source.setting} holds no token ids; name files with ids")
    if len(dtypes) > 1:
        raise ConfigError(f"{source.setting} mixes ids of types {', '.join(sorted(dtypes))}; select files of one type")
    (dtype,) = dtypes
    facts = {s: {"dtype": dtype, "sha256": joined(hashes[s]), "shards": parts} for s, parts in found.items()}
    return facts, dict(counts)


def _end_of_training(count: int, size: int, documents: np.ndarray, share: float) -> int:
    """Return how many of ``count`` tokens of ``size`` bytes are for training: whole documents, where they are known."""
    end = count - int(count * share)
    if len(documents):  # the next one begins validation
        later = documents[np.searchsorted(documents, end * size) :][:1] // size
        end = min([count, *later.tolist()])
    return end


def _parts(name: str, begin: int, stop: int, step: int) -> list[dict]:
    return [{"name": name, "start": at, "count": min(step, stop - at)} for at in range(begin, stop, step) or [begin]]


def _hash(path: Path, dtype: str, vocabulary: int, part: dict) -> str:
    digest, end, size = sha256(), part["start"] + part["count"], np.dtype(dtype).itemsize
    for start in range(part["start"], end, PIECE):
        ids = np.fromfile(path, dtype, min(PIECE, end - start), offset=start * size)
        require_ids(ids, vocabulary)
        digest.update(ids)
    return digest.hexdigest()


def _layout(path: Path, vocabulary: int) -> tuple[str, np.ndarray]:
    """Return the type of the tokens, and where documents begin, in bytes: nowhere in a flat file. Raises ValueError."""
    size, index = path.stat().st_size, path.with_suffix(".idx")
    if not index.exists():
        dtype = token_dtype(vocabulary)
        for wider in ("<u4", "<i8"):
            ids = np.fromfile(path, dtype, LOOKED_AT)
            if len(ids) > 1 and not ids[1::2].any():  # nobody's text has every second id 0
                dtype = wider
        if size % np.dtype(dtype).itemsize:
            raise ValueError(f"its {size:,} bytes are not whole ids of type {dtype}")
        return dtype, np.empty(0, "<i8")
    with index.open("rb") as opened:
        header = opened.read(HEADER.size)
    if len(header) < HEADER.size or (found := HEADER.unpack(header))[:2] != START or found[2] not in DTYPES:
        raise ValueError(f"{index.name} is not an index of Megatron's with integer ids (version 1)")
    _, _, code, sequences, documents = found
    lengths = np.memmap(index, "<i4", "r", HEADER.size, sequences)
    places = np.memmap(index, "<i8", "r", HEADER.size + 4 * sequences, sequences)
    ends = places + lengths.astype("<i8") * np.dtype(DTYPES[code]).itemsize
    if not sequences and not size:
        return DTYPES[code], places
    if not sequences or size != ends[-1]:
        raise ValueError(f"it has {size:,} bytes, but {index.name} describes {int(ends[-1]) if sequences else 0:,}")
    if places[0] or (places[1:] != ends[:-1]).any():
        raise ValueError(f"{index.name} does not describe its sequences one after another")
    firsts = np.concatenate(([0], np.memmap(index, "<i8", "r", HEADER.size + 12 * sequences, documents)))
    return DTYPES[code], places[np.unique(firsts[firsts < sequences])]
