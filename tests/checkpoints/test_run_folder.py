import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from mxtrain.checkpoints import run_folder
from mxtrain.checkpoints.run_folder import LOCK_FILE, locked
from mxtrain.errors import ConfigError
from mxtrain.settings.read import known_fields

HOLDER = """
import os, pathlib, sys, time
from mxtrain.checkpoints.run_folder import locked
with locked(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:  # the child is like a dataloader worker, which outlives a killed parent for a while
        print("locked", flush=True)  # and has closed the lock's file
    time.sleep(60)
"""


def test_defaults_are_titans():
    assert {
        "checkpoint.interval": run_folder.CHECKPOINT_INTERVAL,
        "checkpoint.folder": run_folder.CHECKPOINT_FOLDER,
        "optimizer.lr": run_folder.LEARNING_RATE,
        "metrics.log_freq": run_folder.LOG_FREQ,
        "training.steps": run_folder.STEPS,
    }.items() <= {name: setting.default for name, setting in known_fields().items()}.items()


def refusal(folder) -> str:
    with pytest.raises(ConfigError) as error, locked(folder):
        pass
    return str(error.value)


def test_the_lock_names_its_holder_and_is_free_when_the_holder_is_killed(tmp_path):
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as holder:
        assert holder.stdout.readline() == "locked\n"
        assert refusal(tmp_path) == (
            f"job.dump_folder = {str(tmp_path)!r} is in use by process {holder.pid} on {socket.gethostname()}; wait "
            "until that run ends, stop it, or choose another folder"
        )
        holder.kill()
        holder.wait()
        with locked(tmp_path) as warning:
            assert warning is None
            assert f"is in use by process {os.getpid()} on " in refusal(tmp_path)
            (tmp_path / LOCK_FILE).write_bytes(b"\xff")
            assert "is in use by another run;" in refusal(tmp_path)
        os.killpg(holder.pid, signal.SIGKILL)


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path) as warning:
        assert warning == (
            f"{tmp_path / '.lock'} cannot be locked (No locks available): nothing keeps a second run out of this folder"
        )


def test_a_folder_that_cannot_be_written(tmp_path, full_disk):
    with full_disk(0):
        assert "/.lock: File too large" in refusal(tmp_path)
    (tmp_path / "file").write_text("")
    assert "file/run' cannot be written: " in refusal(tmp_path / "file" / "run")
