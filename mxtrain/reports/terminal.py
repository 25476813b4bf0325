"""What a run shows on the terminal, and the files in its folder that hold everything else.

The first process shows the model, what was swapped, progress and warnings. All lines of TorchTitan's logger go to
``train.log``, those of the other processes to ``worker_logs/rankN.log``, and lists of swapped modules to
``conversion.txt``. With ``--verbose``, and in a process that never calls ``start`` (``-m torchtitan.train``),
TorchTitan's logger writes to the terminal and takes mxtrain's lines too.
"""

import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxtrain.checkpoints.run_folder import CONVERSION_FILE, LOG_FILE, WORKER_LOGS
from mxtrain.errors import ConfigError
from mxtrain.files import reason

logger = logging.getLogger()  # TorchTitan's

# Beginnings of TorchTitan's warnings that a user cannot act on. They go to the log file only.
LOG_ONLY = (
    "ENV[TORCH_NCCL_ASYNC_ERROR_HANDLING]",  # torchrun sets this variable, and TorchTitan overrides it
    "Error running lspci",  # TorchTitan then takes PyTorch's name of the device
    "Peak flops undefined for",  # then the MFU is not shown
    "model.safetensors.index.json not found",  # of interest only to TorchTitan's own export
    "Failed to use grouped mm",  # experts run one after another instead, as they must on this hardware
)

_ESCAPE_CODES = re.compile(r"\x1b\[[0-9;]*m")


class Screen:
    """Writes lines to stdout. On a terminal, a status line stays at the bottom and is rewritten in place.

    Rewriting takes a carriage return and spaces: no escape codes, and neither in a file or pipe. What cannot be
    written, to a file on a full disk or a closed pipe, is dropped: training goes on.
    """

    def __init__(self):
        self._in_place = sys.stdout.isatty()
        self._shown = 0  # characters of the status line on the screen

    def line(self, text: str) -> None:
        """Write ``text`` in the place of the status line, and keep it."""
        self.clear()
        self._write(f"{text}\n")

    def status(self, text: str) -> None:
        """Show ``text`` until the next line or status. In a file or pipe it is a line like any other."""
        if not self._in_place:
            self.line(text)
            return
        self.clear()
        text = text[: shutil.get_terminal_size().columns - 1]  # a line that wraps could not be rewritten
        self._write(text)
        self._shown = len(text)

    def clear(self) -> None:
        """Remove the status line."""
        if self._shown:
            self._write("\r" + " " * self._shown + "\r")
            self._shown = 0

    def close(self) -> None:
        """Keep the status line as it is now."""
        if self._shown:
            self._write("\n")
            self._shown = 0

    def _write(self, text: str) -> None:
        with suppress(OSError):
            print(text, end="", flush=True)


_screen: Screen | None = None  # of the first process of a run that is not verbose
_folder: Path | None = None  # of a run, in its first process


def start(folder: Path, verbose: bool) -> None:
    """Send TorchTitan's log to files in ``folder``, and to the terminal either all of it or what a person reads.

    Comes after TorchTitan's ``init_logger``, which lets the log go to the terminal.

    Raises ConfigError if the files cannot be written.
    """
    global _screen, _folder
    _screen = _folder = None
    rank = os.environ.get("RANK", "0")
    log_file = folder / LOG_FILE if rank == "0" else folder / WORKER_LOGS / f"rank{rank}.log"
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = logging.FileHandler(log_file, encoding="utf-8")
        if rank == "0":
            (folder / CONVERSION_FILE).unlink(missing_ok=True)
    except OSError as error:
        message = f"job.dump_folder = {str(folder)!r} cannot be written: {error.filename}: {reason(error)}"
        raise ConfigError(message) from error
    logging.raiseExceptions = False  # on a full disk, training goes on without its log
    if rank == "0":
        _folder = folder
    if verbose:
        if not sys.stdout.isatty():
            for handler in logger.handlers:
                handler.setFormatter(_PlainFormatter(handler.formatter._fmt))
    else:
        logger.handlers.clear()
        logging.captureWarnings(True)  # so that a warning does not run into the status line
        if rank == "0":
            _screen = Screen()
            logger.addHandler(_WarningHandler(_screen))
    log.setFormatter(_PlainFormatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(log)


def finish() -> None:
    """Leave the last status line on the terminal, so that whatever is printed next starts a line."""
    if _screen is not None:
        _screen.close()


def show_line(text: str) -> None:
    """Show a line that stays, in the first process."""
    if _screen is not None:
        _screen.line(text)


def show_status(text: str) -> None:
    """Show a line that the next one replaces, in the first process."""
    if _screen is not None:
        _screen.status(text)


def note(text: str) -> None:
    """Show and log a line."""
    show_line(text)
    logger.info(text)


def note_progress(text: str) -> None:
    """Show and log how far the preparation of the text is."""
    show_status(text)
    logger.info(text)


def note_conversion(name: str, headline: str, details: str) -> None:
    """Show in one line what a converter did, and write the whole of it to the run's ``conversion.txt``.

    Args:
        name: of the converter, with its recipe and mode if it has some: "mxnorm mxfp8 p=2 (reference)".
        headline: what it did, in one line: "12 norms and 36 linears swapped, 5 kept".
        details: the list of modules, one a line.
    """
    headline = f"{name}: {headline}"
    logger.info(f"{headline}\n{details}")
    if _folder is None:
        return
    path = _folder / CONVERSION_FILE
    with go_on_without(path):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{headline}\n{details}\n")
        headline = f"{headline}; details in {path}"
    show_line(headline)


@contextmanager
def go_on_without(path: Path) -> Iterator[None]:
    """Turn a failure to write ``path`` into a warning: training is worth more than one of its files."""
    try:
        yield
    except OSError as error:
        logger.warning(f"{path} cannot be written: {reason(error)}; training goes on without it")


class _PlainFormatter(logging.Formatter):
    """Drops the escape codes with which TorchTitan colors its lines."""

    def format(self, record: logging.LogRecord) -> str:
        return _ESCAPE_CODES.sub("", super().format(record))


class _WarningHandler(logging.Handler):
    """Writes warnings and errors to stderr, one with another in the place of the status line."""

    def __init__(self, screen: Screen):
        super().__init__(logging.WARNING)
        self.setFormatter(_PlainFormatter())
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record).rstrip()
        if not text.startswith(LOG_ONLY):
            self._screen.clear()
            with suppress(OSError):
                print(f"{record.levelname.lower()}: {text}", file=sys.stderr, flush=True)
