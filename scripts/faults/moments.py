"""The moments at which a run is killed, recognized by how its folder of checkpoints changes."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

COMPLETE_MARK = ".metadata"
"""A file that is written last, or in a temporary folder"""
SAVING, SET_ASIDE = ".saving", "set_aside"


@dataclass(frozen=True)
class Saved:
    """What the folder of checkpoints holds at one moment."""

    complete: dict[int, int]
    """Step of every complete checkpoint -> number of its files"""
    partial: frozenset[str] = frozenset()
    """Names of checkpoints that are being written, or that a kill left"""
    set_aside: int = 0
    """Number of checkpoints that were set aside"""

    @property
    def newest(self) -> int:
        """Step of the newest complete checkpoint, or 0."""
        return max(self.complete, default=0)


def look(folder: Path) -> Saved:
    """Look at a folder of checkpoints, which may change meanwhile or not exist."""
    complete, partial = {}, set()
    for name in _names(folder):
        if name.startswith(SAVING):
            partial |= {name, *(f"{name}/{child}" for child in _names(folder / name))}
        elif name.startswith("step-") and name.removeprefix("step-").isdigit():
            files = _names(folder / name)
            if COMPLETE_MARK in files:
                complete[int(name.removeprefix("step-"))] = len(files)
            else:
                partial.add(name)
    return Saved(complete, frozenset(partial), len(_names(folder / SET_ASIDE)))


def _names(folder: Path) -> list[str]:
    with suppress(OSError):
        return os.listdir(folder)
    return []


@dataclass(frozen=True)
class Moment:
    """A moment to kill at.

    Attributes:
        has_come: from what the folder held before and holds now; None kills after a random time.
        delay: kill up to so many seconds later, at random.
        goes_back: resume from the older of two checkpoints, so that steps are saved a second time.
        needs: complete checkpoints that the run must have before.
    """

    name: str
    has_come: Callable[[Saved, Saved], bool] | None
    delay: float = 0.0
    goes_back: bool = False
    needs: int = 0


def save_begins(before: Saved, now: Saved) -> bool:
    return bool(now.partial - before.partial)


def first_save_begins(before: Saved, now: Saved) -> bool:
    return not now.complete and save_begins(before, now)


def save_ends(before: Saved, now: Saved) -> bool:
    return bool(now.complete.keys() - before.complete.keys())


def checkpoint_vanishes(before: Saved, now: Saved) -> bool:
    """A complete checkpoint has lost files or its name: it is purged, replaced or set aside."""
    return any(now.complete.get(step, 0) < files for step, files in before.complete.items())


def is_replaced(before: Saved, now: Saved) -> bool:
    return now.set_aside > before.set_aside or checkpoint_vanishes(before, now)


EXPORT = "export"


def moments(is_async: bool, can_export: bool) -> list[Moment]:
    """Return the moments that a run has."""
    found = [
        Moment("random", None),
        Moment("first save", first_save_begins, delay=0.1),
        Moment("save begins", save_begins),
        Moment("save", save_begins, delay=0.3),
        Moment("save ends", save_ends),
        Moment("purge", checkpoint_vanishes),
        Moment("overwrite", is_replaced, goes_back=True, needs=2),
    ]
    if is_async:
        found.append(Moment("upload", save_begins, delay=0.5))
    if can_export:
        found.append(Moment(EXPORT, None, needs=1))
    return found
