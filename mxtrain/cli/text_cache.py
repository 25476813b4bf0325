"""What ``mxtrain cache`` does: list, verify and remove the prepared texts in the cache."""

import re
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from mxtrain.data import DataConfig
from mxtrain.data.cache_folders import BUILDING, LEFTOVER_SECONDS, last_change, statuses
from mxtrain.data.prepared_text import DamagedText, Prepared, load_text
from mxtrain.data.progress import megabytes, one_line
from mxtrain.errors import ConfigError

DAY = 24 * 3600.0

# The name of a prepared text ends with a part of a hash. Other folders of the cache hold tuned plans.
NAME = re.compile(r".+-[0-9a-f]{16}")


@dataclass(frozen=True)
class CachedText:
    """A folder in the cache."""

    path: Path
    size: int
    """Bytes of all files"""

    last_used: float
    """Seconds since 1970"""

    text: Prepared | None
    """None if it cannot be used"""

    state: str
    """"ok", "verified" if its tokens were read, or what is wrong"""


def entries(cache_dir: str = "", verify: bool = False) -> list[CachedText]:
    """Return the prepared texts and the leftovers of killed processes, by name. "" is the default cache folder."""
    root = DataConfig(cache_dir=cache_dir).cache_path()
    if cache_dir and not root.is_dir():
        raise ConfigError(f"--cache-dir = {cache_dir!r} is not a folder")
    return [_entry(path, verify) for path in sorted(root.glob("*")) if path.is_dir() and _is_text(path)]


def report(cache_dir: str = "", verify: bool = False) -> str:
    """Return a table of the cache; ``verify`` also reads the token files and compares their hashes."""
    found = entries(cache_dir, verify)
    header = ("name", "size", "last used", "dataset", "tokens", "state")
    rows = [header, *map(_row, found)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    total = f"{len(found)} in {DataConfig(cache_dir=cache_dir).cache_path()}, {megabytes(sum(e.size for e in found))}"
    return "\n".join([*lines, total] if found else [total])


def prune(cache_dir: str, days: float) -> str:
    """Remove what was not used or written for ``days`` days. Return a report, one line for each.

    An unfinished folder that has changed within LEFTOVER_SECONDS stays: a process may be building it.
    """
    if not days >= 0:
        raise ConfigError(f"--prune = {days} is not a number of days from 0")
    old = [entry for entry in entries(cache_dir) if time.time() - entry.last_used > _patience(entry, days)]
    return _remove(old) or f"nothing is older than {days:g} days"


def remove(cache_dir: str, names: list[str]) -> str:
    """Remove prepared texts by name. Return a report, one line for each."""
    by_name = {entry.path.name: entry for entry in entries(cache_dir)}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ConfigError(f"--remove: there is no {unknown[0]!r} in the cache; 'mxtrain cache' lists the names")
    return _remove([by_name[name] for name in names])


def _patience(entry: CachedText, days: float) -> float:
    return max(days * DAY, LEFTOVER_SECONDS if BUILDING in entry.path.name else 0.0)


def _is_text(path: Path) -> bool:
    return NAME.fullmatch(path.name.partition(BUILDING)[0]) is not None


def _entry(path: Path, verify: bool) -> CachedText:
    text, state = None, "verified" if verify else "ok"
    if BUILDING in path.name:
        state = "unfinished: being built, or left by a killed process"
    else:
        try:
            text = load_text(path, reads_tokens=verify)
        except DamagedText as error:
            state = f"damaged: {error}"
        except ConfigError:
            state = "its tokenizer, outside the cache, is gone or changed"
    size = sum(status.st_size for status in statuses(path) if S_ISREG(status.st_mode))
    return CachedText(path, size, last_change(path), text, state)


def _row(entry: CachedText) -> tuple[str, ...]:
    days = max(0.0, time.time() - entry.last_used) / DAY
    dataset, tokens = "-", "-"
    if entry.text:
        dataset = entry.text.report.dataset
        if entry.text.train is not None:
            tokens = f"{entry.text.train.count:,}"
    return (entry.path.name, megabytes(entry.size), f"{days:.1f} days ago", dataset, tokens, entry.state)


def _remove(found: list[CachedText]) -> str:
    lines = []
    for entry in found:
        try:
            shutil.rmtree(entry.path)
        except OSError as error:
            why = error.strerror or one_line(error)
            raise ConfigError(f"data.cache_dir: cannot remove {str(entry.path)!r} ({why})") from error
        lines.append(f"removed {entry.path.name}, {megabytes(entry.size)}")
    return "\n".join(lines)
