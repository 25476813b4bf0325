"""What a run shows on the terminal, and the files in its folder that hold everything else.

The first process shows the model, what was swapped, progress and warnings. All lines of TorchTitan's logger go to
``train.log``, those of the other processes to ``worker_logs/rankN.log``, and lists of swapped modules to
``conversion.txt``. With ``--verbose``, and in a process that never calls ``start`` (``-m torchtitan.train``),
TorchTitan's logger writes to the terminal and takes mxtrain's lines too.
"""

import logging
import os
import re
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


_shows = False  # in the first process of a run that is not verbose
_folder: Path | None = None  # of a run, in its first process


def show(text: str) -> None:
    """Write a line to stdout. On a full disk or a closed pipe it is lost: training goes on."""
    with suppress(OSError):
        print(text, flush=True)


def start(folder: Path, verbose: bool) -> None:
    """Send TorchTitan's log to files in ``folder``, and to the terminal either all of it or what a person reads.

    Comes after TorchTitan's ``init_logger``, which lets the log go to the terminal.
    """
    global _shows, _folder
    _shows, _folder = False, None
    rank = os.environ.get("RANK", "0")
    log_file = folder / LOG_FILE if rank == "0" else folder / WORKER_LOGS / f"rank{rank}.log"
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log = logging.FileHandler(log_file, encoding="utf-8")
        if rank == "0":
            _folder = folder
            (folder / CONVERSION_FILE).unlink(missing_ok=True)
    except OSError as error:
        message = f"job.dump_folder = {str(folder)!r} cannot be written: {error.filename}: {reason(error)}"
        raise ConfigError(message) from error
    logging.raiseExceptions = False  # on a full disk, training goes on without its log
    if verbose:
        if not sys.stdout.isatty():
            for handler in logger.handlers:
                handler.setFormatter(_PlainFormatter(handler.formatter._fmt))
    else:
        logger.handlers.clear()
        logging.captureWarnings(True)
        _shows = rank == "0"
        if _shows:
            warnings = logging.StreamHandler()  # to stderr
            warnings.setLevel(logging.WARNING)
            warnings.setFormatter(_WarningFormatter())
            warnings.addFilter(lambda record: not record.getMessage().startswith(LOG_ONLY))
            logger.addHandler(warnings)
    log.setFormatter(_PlainFormatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s"))
    logger.addHandler(log)


def show_line(text: str) -> None:
    """Show a line, in the first process."""
    if _shows:
        show(text)


def note(text: str) -> None:
    """Show and log a line."""
    show_line(text)
    logger.info(text)


def note_conversion(report: str) -> None:
    """Show the first line of the report on a conversion, and write all of it to the run's ``conversion.txt``."""
    logger.info(report)
    if _folder is None:
        return
    path, headline = _folder / CONVERSION_FILE, report.partition("\n")[0]
    with go_on_without(path):
        with open(path, "a", encoding="utf-8") as file:
            file.write(f"{report}\n")
        headline += f"; details in {path}"
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


class _WarningFormatter(_PlainFormatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: {super().format(record).rstrip()}"
