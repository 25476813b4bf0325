"""``mxtrain cache``: list, verify and remove the prepared texts in the cache."""

import os
import re
import shutil
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from stat import S_ISREG

from mxtrain.data import DataConfig, Prepared
from mxtrain.data.documents import megabytes
from mxtrain.data.store import DamagedText, load_text
from mxtrain.errors import ConfigError
from mxtrain.files import BUILDING, os_errors_as

DAY = 24 * 3600.0

# The name of a prepared text ends with a part of a hash. Other folders of the cache hold tuned plans.
NAME = re.compile(rf".+-[0-9a-f]{{16}}({re.escape(BUILDING)}.*)?")


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "cache",
        help="list, verify or remove the prepared texts",
        description="""\
List the prepared texts in the cache: name, size, last use, dataset, tokens, and whether a text is damaged. Set
data.prepared to a name to train on exactly that text.

  mxtrain cache
  mxtrain cache --verify         also read the tokens and compare their hashes
  mxtrain cache --prune 30       remove what was not used for 30 days, leftovers of killed processes included
  mxtrain cache --remove python-0123456789abcdef
""",
    )
    parser.set_defaults(run=_cache)
    parser.add_argument("--cache-dir", metavar="DIR", default="", help="default: $MXTRAIN_CACHE, else ~/.cache/mxtrain")
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--verify", action="store_true", help="read the tokens and compare their hashes")
    action.add_argument("--prune", metavar="DAYS", type=float, help="remove what was not used for so many days")
    action.add_argument("--remove", metavar="NAME", nargs="+", help="remove these")


def _cache(options) -> int:
    root = DataConfig(cache_dir=options.cache_dir).cache_path()
    if options.prune is not None and not options.prune >= 0:
        raise ConfigError(f"--prune = {options.prune} is not a number of days from 0")
    if options.cache_dir and not root.is_dir():
        raise ConfigError(f"--cache-dir = {options.cache_dir!r} is not a folder")
    paths = [path for path in sorted(root.glob("*")) if path.is_dir() and NAME.fullmatch(path.name)]
    found = [_entry(path, options.verify) for path in paths]
    if options.prune is not None:
        # A process may still write an unfinished folder that is young.
        patience = {True: max(options.prune, 1.0) * DAY, False: options.prune * DAY}
        old = [entry for entry in found if time.time() - entry.last_used > patience[BUILDING in entry.path.name]]
        print(_remove(old) or f"nothing is older than {options.prune:g} days")
    elif options.remove:
        by_name = {entry.path.name: entry for entry in found}
        for name in options.remove:
            if name not in by_name:
                raise ConfigError(f"--remove: there is no {name!r} in the cache; 'mxtrain cache' lists the names")
        print(_remove([by_name[name] for name in options.remove]))
    else:
        print(_table(found) + f"{len(found)} in {root}, {megabytes(sum(entry.size for entry in found))}")
    return 0


@dataclass(frozen=True)
class CachedText:
    """A folder in the cache: a prepared text, or what a killed process has left."""

    path: Path
    size: int
    """Bytes of all files"""
    last_used: float
    """Seconds since 1970"""
    text: Prepared | None
    """None if it cannot be used"""
    state: str
    """"ok", "verified" if its tokens were read, or what is wrong"""


def _entry(path: Path, verify: bool) -> CachedText:
    text, state = None, "verified" if verify else "ok"
    if BUILDING in path.name:
        state = "unfinished: being built, or left by a killed process"
    else:
        try:
            text = load_text(path, again=verify)
        except DamagedText as error:
            state = f"damaged: {error}"
        except ConfigError:
            state = "its tokenizer, outside the cache, is gone or changed"
    statuses = []
    for each in (path, *(Path(root, name) for root, *names in os.walk(path) for name in (*names[0], *names[1]))):
        with suppress(OSError):  # another process may remove it meanwhile
            statuses.append(each.lstat())  # not the size of files that a link names
    size = sum(status.st_size for status in statuses if S_ISREG(status.st_mode))
    return CachedText(path, size, max((status.st_mtime for status in statuses), default=0.0), text, state)


def _table(found: list[CachedText]) -> str:
    from mxtrain.analysis.tables import aligned  # takes time

    rows = [("name", "size", "last used", "dataset", "tokens", "state")]
    for entry in found:
        days = max(0.0, time.time() - entry.last_used) / DAY
        dataset = entry.text.report.dataset if entry.text else "-"
        tokens = f"{entry.text.train.count:,}" if entry.text and entry.text.train else "-"
        rows.append((entry.path.name, megabytes(entry.size), f"{days:.1f} days ago", dataset, tokens, entry.state))
    return aligned(rows, words=len(rows[0])) + "\n" if found else ""


def _remove(found: list[CachedText]) -> str:
    """Remove folders. Return a report, one line for each."""
    lines = []
    for entry in found:
        with os_errors_as(f"data.cache_dir: cannot remove {str(entry.path)!r}"):
            shutil.rmtree(entry.path)
        lines.append(f"removed {entry.path.name}, {megabytes(entry.size)}")
    return "\n".join(lines)
