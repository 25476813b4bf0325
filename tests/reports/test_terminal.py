import io
import logging
import re
import sys
import warnings

import pytest
from torchtitan.tools.logging import init_logger, logger

from mxtrain.errors import ConfigError
from mxtrain.reports import loggers, terminal
from mxtrain.reports.loggers import ProgressLogger
from mxtrain.reports.terminal import Screen


class TerminalFile(io.TextIOWrapper):
    def isatty(self):
        return True


class Terminal(io.StringIO):
    isatty = TerminalFile.isatty


def test_a_status_line_is_rewritten_in_place(monkeypatch):
    monkeypatch.setattr(sys, "stdout", Terminal())
    monkeypatch.setenv("COLUMNS", "11")
    screen = Screen()
    screen.status("step 1")
    screen.status("a line of more than ten characters")
    screen.line("kept")
    screen.status("step 2")
    screen.close()
    screen.close()
    clear_6, clear_10 = "\r" + 6 * " " + "\r", "\r" + 10 * " " + "\r"
    assert sys.stdout.getvalue() == f"step 1{clear_6}a line of {clear_10}kept\nstep 2\n"


def test_a_status_line_in_a_pipe_is_a_line(capsys):
    screen = Screen()
    screen.status("step 1")
    screen.line("kept")
    screen.close()
    assert capsys.readouterr().out == "step 1\nkept\n"


@pytest.fixture
def started(monkeypatch, tmp_path):
    """``terminal.start``, undone after the test."""
    handlers, level = logger.handlers[:], logger.level
    for name in ("_screen", "_folder"):
        monkeypatch.setattr(terminal, name, None)
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


def test_warnings_a_user_can_act_on_are_shown_between_status_lines(started, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "stdout", Terminal())
    (tmp_path / "train.log").symlink_to(tmp_path / "other")
    started()
    terminal.show_status("step 1")
    logger.warning("Error running lspci: no such file, fallback to use device_name")
    logger.info("an information")
    assert sys.stdout.getvalue() == "step 1"
    logger.warning("\x1b[31mDataset has run out of data\x1b[39m")
    warnings.warn("tuned plans are ignored", stacklevel=1)
    logger.error("Failed to create WandB logger")
    err = capsys.readouterr().err
    assert sys.stdout.getvalue() == "step 1\r      \r"
    first, second, *_, last = err.splitlines()
    assert (first, last) == ("warning: Dataset has run out of data", "error: Failed to create WandB logger")
    assert re.fullmatch(r"warning: .*test_terminal\.py:\d+: UserWarning: tuned plans are ignored", second)
    log = (tmp_path / "train.log").read_text()
    assert "lspci" in log and "an information" in log and "tuned plans" in log and "\x1b" not in log
    assert not (tmp_path / "other").exists(), "a link in a run's folder may name any file"


def test_conversions_follow_the_model_and_a_new_run_starts_a_new_list(started, capsys, tmp_path):
    (tmp_path / "conversion.txt").write_text("of an earlier run")
    started()
    terminal.note_conversion("mxnorm", "2 swapped", "  a\n  b")
    terminal.note_conversion("fused_norm", "1 swapped", "  c")
    assert capsys.readouterr().out == ""
    terminal.note_model("the model")
    where = f"; details in {tmp_path}/conversion.txt"
    assert capsys.readouterr().out == f"the model\nmxnorm: 2 swapped{where}\nfused_norm: 1 swapped{where}\n"
    assert (tmp_path / "conversion.txt").read_text() == "mxnorm: 2 swapped\n  a\n  b\nfused_norm: 1 swapped\n  c\n"


def test_a_conversion_that_cannot_be_written_is_shown_all_the_same(started, capsys, tmp_path):
    started()
    (tmp_path / "conversion.txt").mkdir()
    terminal.note_conversion("mxnorm", "2 swapped", "  a")
    terminal.note_model("the model")
    out, err = capsys.readouterr()
    assert out == "the model\nmxnorm: 2 swapped\n"
    assert err == f"warning: {tmp_path}/conversion.txt cannot be written: Is a directory; training goes on without it\n"


def test_a_log_on_a_full_disk_is_one_warning(started, capsys, tmp_path, full_disk):
    started()
    logger.info("before")
    with full_disk((tmp_path / "train.log").stat().st_size):
        for number in range(3):
            logger.info(f"line {number}")
    warning = f"warning: {tmp_path}/train.log cannot be written: File too large; training goes on\n"
    assert capsys.readouterr().err == warning
    logger.info("after")
    assert (tmp_path / "train.log").read_text().endswith("after\n")


@pytest.mark.parametrize("name", ["train.log", "conversion.txt"])
def test_a_folder_whose_files_cannot_be_written_is_refused(name, started, tmp_path):
    (tmp_path / name).mkdir()
    problem = f"job.dump_folder = {str(tmp_path)!r} cannot be written: {tmp_path / name}: Is a directory"
    with pytest.raises(ConfigError, match=f"^{re.escape(problem)}$"):
        started()


def test_training_goes_on_when_nobody_can_read_the_screen(monkeypatch):
    for kind in (io.TextIOWrapper, TerminalFile):
        full = kind(open("/dev/full", "wb", buffering=0), write_through=True)  # as with python -u
        monkeypatch.setattr(sys, "stdout", full)
        screen = Screen()
        screen.status("step 1")
        screen.line("kept")
        screen.status("step 2")
        screen.close()
        with pytest.raises(OSError, match="No space left"):
            print("lost")


def test_without_a_terminal_conversions_go_to_torchtitans_logger(caplog):
    caplog.set_level(logging.INFO)
    terminal.note_conversion("mxnorm", "2 swapped", "  a")
    assert caplog.messages == ["mxnorm: 2 swapped\n  a"]


def test_progress_shows_speed_and_the_time_left_from_the_steps_after_the_first(monkeypatch):
    shown, clock = [], iter([100.0, 160.0, 161.0, 201.0])
    monkeypatch.setattr(loggers.time, "perf_counter", lambda: next(clock))
    for name in ("show_status", "show_line"):
        monkeypatch.setattr(loggers, name, shown.append)
    progress = ProgressLogger(steps=1000, processes=2)
    row = {"loss_metrics/global_avg_loss": float("nan"), "throughput(tps)": 1234.5, "tflops": 1212.3}
    progress.log(row, 1)
    progress.log({**row, "grad_norm": 0.12345, "mfu(%)": 41.25}, 11)
    progress.log({"validation_metrics/loss": 2.0}, 11)
    progress.log({"loss_metrics/global_avg_loss": 1.0, "throughput(tps)": 10.0, "tflops": 0.012345}, 1000)
    assert shown == [
        "step    1/1000  loss nan  1,234 tokens/s per device  1,212 TFLOP/s per device",
        "step   11/1000  loss nan  grad norm 0.123  1,234 tokens/s per device  1:38:54 left  1,212 TFLOP/s per device"
        "  MFU 41.2 %",
        "step   11/1000  validation loss 2.0000",
        "step 1000/1000  loss 1.0000  10 tokens/s per device  0.01235 TFLOP/s per device",
    ]
