"""Text that is tokenized already, in ``.bin`` files: Megatron's, beside an ``.idx`` file, and flat ones, of ids only.

The tokens stay where they lie: a prepared text has links to the files, and a hash for every SHARD_BYTES of them.
"""

import os
import struct
import sys
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path

import numpy as np

from mxtrain.data.config import DataConfig
from mxtrain.data.documents import Progress, megabytes, one_line
from mxtrain.data.encode import SPLITS, token_dtype
from mxtrain.data.local_files import LocalFiles, require_ids
from mxtrain.data.store import SHARD_BYTES
from mxtrain.data.token_file import TokenFile
from mxtrain.errors import ConfigError

# megatron/core/datasets/indexed_dataset.py: magic, version, dtype, number of sequences and of document ends; then the
# sequences' lengths (int32) and their places in the .bin file (int64, bytes), and the documents' ends (int64).
HEADER, START = struct.Struct("<9sQBQQ"), (b"MMIDIDX\x00\x00", 1)
DTYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}

LOOKED_AT = 1 << 16
PIECE = 1 << 22
"""Tokens read at a time"""


def link_tokens(
    source: LocalFiles, folder: Path, config: DataConfig, progress: Progress
) -> tuple[dict[str, TokenFile], dict[str, int]]:
    """Link a source's files into ``folder``, and read their tokens, on all cores, for their hashes.

    The last documents of every Megatron file and the last tokens of every flat file are held out. Returns the files by
    split, and counts of a ``TextReport``. Raises ConfigError for a damaged file, for an id outside the vocabulary, and
    if all files are empty.
    """
    found, counts, hashed = {split: [] for split in SPLITS}, Counter(), partial(_hashed, vocabulary=source.vocabulary)
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
                files = _parts(link, dtype, documents, config.validation_share, room)
                for split, parts in files.items():
                    for part in pool.map(hashed, parts):
                        found[split].append(part)
                        counts.update({"bytes": part.size, f"{split}_tokens": part.count})
                        progress.tick(lambda: f"read {megabytes(counts['bytes'])} of {megabytes(source.text_bytes)}")
            except (OSError, ValueError) as error:
                raise ConfigError(f"{source.setting}: cannot read {path} as token ids: {one_line(error)}") from error
            held_out = files["validation"][0].span[0], files["validation"][-1].span[1]
            before, begun = np.searchsorted(documents, held_out).tolist()
            counts.update({"documents": begun, "validation_documents": begun - before})
    if not found["train"]:
        raise ConfigError(f"{source.setting} holds no token ids")
    if len(dtypes := {part.dtype for part in found["train"]}) > 1:
        raise ConfigError(f"{source.setting} mixes ids of types {', '.join(sorted(dtypes))}; select files of one type")
    return {split: TokenFile.of(parts) for split, parts in found.items()}, dict(counts)


def _parts(link: Path, dtype: str, documents: np.ndarray, share: float, room: int) -> dict[str, list[TokenFile]]:
    """Cut a file, of which at most ``room`` bytes are read, into training and validation, and these into parts."""
    size = np.dtype(dtype).itemsize
    count, step = min(link.stat().st_size, room) // size, SHARD_BYTES // size
    end = count - int(count * share)
    if len(documents):  # the next one begins validation
        later = documents[np.searchsorted(documents, end * size) :][:1] // size
        end = min([count, *later.tolist()])
    spans = {"train": (0, end), "validation": (end, count)}
    return {
        split: [TokenFile(link, dtype, min(step, stop - at), start=at) for at in range(begin, stop, step) or [begin]]
        for split, (begin, stop) in spans.items()
    }


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
            raise ValueError(f"{size:,} bytes are not a number of ids of type {dtype}")
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
        raise ValueError(f"it has {size:,} bytes, and {index.name} describes {int(ends[-1]) if sequences else 0:,}")
    if places[0] or (places[1:] != ends[:-1]).any():
        raise ValueError(f"{index.name} leaves out a part of it, or has sequences in another order")
    firsts = np.concatenate(([0], np.memmap(index, "<i8", "r", HEADER.size + 12 * sequences, documents)))
    if firsts[-1] > sequences or (np.diff(firsts) < 0).any():
        raise ValueError(f"{index.name} has documents in another order, or more sequences in them than there are")
    return DTYPES[code], places[np.unique(firsts[firsts < sequences])]


def _hashed(part: TokenFile, vocabulary: int) -> TokenFile:
    digest, end, size = sha256(), part.start + part.count, np.dtype(part.dtype).itemsize
    for start in range(part.start, end, PIECE):
        ids = np.fromfile(part.path, part.dtype, min(PIECE, end - start), offset=start * size)
        require_ids(ids, vocabulary)
        digest.update(ids)
    return replace(part, sha256=digest.hexdigest())
