import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys

import pytest

from mxtrain.errors import ConfigError
from mxtrain.run_folder import lock
from mxtrain.run_folder.lock import locked

HOLDER = """
import os, pathlib, sys, time
from mxtrain.run_folder.lock import locked
with locked(pathlib.Path(sys.argv[1])):
    if os.fork() == 0:  # the child is like a dataloader worker, which outlives a killed parent for a while
        print("locked", flush=True)  # and has closed the lock's file
    time.sleep(60)
"""


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock on ``tmp_path``, and has a child."""
    command = [sys.executable, "-c", HOLDER, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout.readline() == "locked\n"
        yield process
        os.killpg(process.pid, signal.SIGKILL)


def test_the_lock_names_its_holder_and_is_free_when_the_holder_is_killed(tmp_path, holder):
    with pytest.raises(ConfigError) as error, locked(tmp_path):
        pass
    assert str(error.value) == (
        f"job.dump_folder = {str(tmp_path)!r} is in use by process {holder.pid} on {socket.gethostname()}; wait until "
        "that run ends, stop it, or choose another folder"
    )
    holder.kill()
    holder.wait()
    with locked(tmp_path) as warning:
        assert warning is None


def test_the_lock_names_its_holder_after_others_have_held_it(tmp_path):
    for _ in range(2):
        with locked(tmp_path):
            pass
    message = f"is in use by process {os.getpid()} on {socket.gethostname()};"
    with locked(tmp_path), pytest.raises(ConfigError, match=message), locked(tmp_path):
        pass


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch):
    def flock(file, operation):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", flock)
    with locked(tmp_path) as warning:
        assert warning == (
            f"{tmp_path / '.lock'} cannot be locked (No locks available): nothing keeps a second run out of this folder"
        )


def test_a_link_in_place_of_the_lock_is_refused(tmp_path):
    other = tmp_path / "other"
    other.write_text("precious")
    (tmp_path / ".lock").symlink_to(other)
    with pytest.raises(ConfigError, match=r"cannot be written: .*\.lock: Too many levels of symbolic links$"):
        with locked(tmp_path):
            pass
    assert other.read_text() == "precious"


def test_a_folder_that_cannot_be_written(tmp_path, full_disk, monkeypatch):
    with full_disk(0), pytest.raises(ConfigError, match=r"cannot be written: .*\.lock: File too large"):
        with locked(tmp_path):
            pass
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/run' cannot be written: .*Not a directory"):
        with locked(tmp_path / "file" / "run"):
            pass


def test_a_damaged_lock_file_names_nobody(tmp_path):
    with locked(tmp_path):
        (tmp_path / lock.LOCK_FILE).write_bytes(b"\xff")
        with pytest.raises(ConfigError, match="is in use by another run"), locked(tmp_path):
            pass
