"""Lists the text files of this machine: Python source, and other text of installed packages and of the system.

A file's key is its path relative to its root ("stdlib/json/decoder.py", "site-packages/numpy/version.py",
"include/stdio.h"), so order and split are the same on every machine, wherever the roots lie.
"""

import gzip
import os
import sys
import sysconfig
import zlib
from collections.abc import Callable
from pathlib import Path
from stat import S_ISREG
from typing import NamedTuple

PACKAGE_FOLDERS = ("site-packages", "dist-packages")
STANDARD_LIBRARY = "stdlib"
SYSTEM_FOLDERS = {"include": "/usr/include", "doc": "/usr/share/doc", "man": "/usr/share/man"}
"""Root in a key -> folder, where a system keeps C headers, documentation and manual pages"""

SOURCE_SUFFIXES = (".h", ".hpp", ".hh", ".c", ".cc", ".cpp", ".cu", ".cuh", ".inc", ".tcc", ".pyi", ".pyx", ".pxd")
TEXT_SUFFIXES = (".md", ".rst", ".txt")
MAX_FILE_BYTES = 1_000_000
"""Largest other file: longer ones are tables, dictionaries and logs rather than prose or code that people wrote"""

CONTROL_CHARACTERS = bytes(set(range(32)) - set(b"\t\n\r\f\v\x1b"))
"""Bytes that no text has; a form feed divides pages, and an escape colors them"""


class SourceFile(NamedTuple):
    key: str
    path: str
    size: int
    mtime_ns: int

    @property
    def package(self) -> str | None:
        """Top-level folder or module in site-packages or in a folder of the system; None for the standard library."""
        root, first, *_ = self.key.split("/")
        return None if root == STANDARD_LIBRARY else first.removesuffix(".py")

    @property
    def is_python(self) -> bool:
        return self.key.endswith(".py")


def list_files(installed: bool, other_files: bool = False) -> list[SourceFile]:
    """List every ``.py`` file of the standard library.

    Args:
        installed: also the packages on ``sys.path``.
        other_files: also the C, C++ and CUDA source, type stubs and documentation (Markdown, reStructuredText and plain
            text) in these folders. From the system come headers, documentation and manual pages.
    """
    is_wanted = _is_text if other_files else _is_python
    files = _walk(Path(sysconfig.get_paths()["stdlib"]), STANDARD_LIBRARY, is_wanted)
    if installed:
        folders = (Path(entry).resolve() for entry in sys.path if Path(entry).name in PACKAGE_FOLDERS)
        for folder in dict.fromkeys(folders):
            files += _walk(folder, "site-packages", is_wanted)
    if other_files:
        for root, folder in SYSTEM_FOLDERS.items():
            files += _walk(Path(folder), root, _is_manual_page if root == "man" else _is_text)
    return files


def read_bytes(file: SourceFile) -> bytes:
    """Return the content of a file, decompressed. Stops behind MAX_FILE_BYTES unless it is Python source.

    Raises OSError, also for a damaged compressed file.
    """
    size = -1 if file.is_python else MAX_FILE_BYTES + 1
    opener = gzip.open if file.path.endswith(".gz") else open
    try:
        with opener(file.path, "rb") as opened:
            return opened.read(size)
    except (EOFError, zlib.error) as error:
        raise OSError(f"{file.path} is damaged: {error}") from error


def has_control_characters(content: bytes) -> bool:
    """Return whether a file holds bytes that no text has, as a font or an archive does under a text's name."""
    return len(content.translate(None, CONTROL_CHARACTERS)) < len(content)


def _is_python(name: str) -> bool:
    return name.endswith(".py")


def _is_text(name: str) -> bool:
    return name.removesuffix(".gz").endswith((".py", *SOURCE_SUFFIXES, *TEXT_SUFFIXES))


def _is_manual_page(name: str) -> bool:
    return name.removesuffix(".gz").rpartition(".")[2][:1].isdigit()  # "ls.1.gz", "printf.3posix"


def _walk(root: Path, prefix: str, is_wanted: Callable[[str], bool]) -> list[SourceFile]:
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in PACKAGE_FOLDERS)
        for name in sorted(names):
            path = os.path.join(folder, name)
            status = _status(path) if is_wanted(name) else None
            if status and S_ISREG(status.st_mode):
                key = f"{prefix}/{Path(path).relative_to(root).as_posix()}"
                files.append(SourceFile(key, path, status.st_size, status.st_mtime_ns))
    return files


def _status(path: str) -> os.stat_result | None:
    try:
        return os.stat(path)
    except OSError:  # a link to nothing, or a file that was just deleted
        return None
