import io
import logging
import re
import sys
import warnings

import pytest
from torchtitan.tools.logging import init_logger, logger

from mxtrain.checkpoints import terminal
from mxtrain.errors import ConfigError


def test_a_line_that_cannot_be_written_is_lost(monkeypatch):
    full = io.TextIOWrapper(open("/dev/full", "wb", buffering=0), write_through=True)  # as with python -u
    monkeypatch.setattr(sys, "stdout", full)
    terminal.show("lost")


@pytest.fixture
def started(monkeypatch, tmp_path):
    """``terminal.start``, undone after the test."""
    handlers, level = logger.handlers[:], logger.level
    monkeypatch.setattr(terminal, "_shows", False)
    monkeypatch.setattr(terminal, "_folder", None)
    monkeypatch.setattr(logging, "raiseExceptions", True)
    for name, value in (("KINETO_LOG_LEVEL", "0"), ("RANK", "0")):
        monkeypatch.setenv(name, value)

    def start():
        init_logger()
        terminal.start(tmp_path, verbose=False)

    yield start
    for handler in logger.handlers:
        handler.close()
    logging.captureWarnings(False)
    logger.handlers[:], logger.level = handlers, level


def test_warnings_a_user_can_act_on_are_shown(started, capsys, tmp_path, full_disk):
    started()
    logger.warning("Error running lspci: no such file, fallback to use device_name")
    logger.info("an information")
    logger.warning("\x1b[31mDataset has run out of data\x1b[39m")
    warnings.warn("tuned plans are ignored", stacklevel=1)
    logger.error("Failed to create WandB logger")
    out, err = capsys.readouterr()
    assert out == ""
    first, second, *_, last = err.splitlines()
    assert (first, last) == ("warning: Dataset has run out of data", "error: Failed to create WandB logger")
    assert re.fullmatch(r"warning: .*test_terminal\.py:\d+: UserWarning: tuned plans are ignored", second)
    log = (tmp_path / "train.log").read_text()
    assert "lspci" in log and "an information" in log and "tuned plans" in log and "\x1b" not in log
    with full_disk(len(log)):
        logger.info("lost")
    assert capsys.readouterr().err == ""


def test_conversions_have_a_line_and_a_new_run_starts_a_new_list(started, capsys, tmp_path):
    (tmp_path / "conversion.txt").write_text("of an earlier run")
    started()
    terminal.note_conversion("mxnorm: 2 swapped\n  a\n  b")
    terminal.note_conversion("fused_norm: 1 swapped\n  c")
    where = f"; details in {tmp_path}/conversion.txt"
    assert capsys.readouterr().out == f"mxnorm: 2 swapped{where}\nfused_norm: 1 swapped{where}\n"
    path = tmp_path / "conversion.txt"
    assert path.read_text() == "mxnorm: 2 swapped\n  a\n  b\nfused_norm: 1 swapped\n  c\n"
    path.unlink()
    path.mkdir()  # cannot be written
    terminal.note_conversion("mxnorm: 2 swapped\n  a")
    out, err = capsys.readouterr()
    assert out == "mxnorm: 2 swapped\n"
    assert err == f"warning: {path} cannot be written: Is a directory; training goes on without it\n"


def test_a_folder_whose_log_cannot_be_written_is_refused(started, tmp_path):
    (tmp_path / "train.log").mkdir()
    problem = f"job.dump_folder = {str(tmp_path)!r} cannot be written: {tmp_path / 'train.log'}: Is a directory"
    with pytest.raises(ConfigError, match=f"^{re.escape(problem)}$"):
        started()
