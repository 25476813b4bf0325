import os
import threading
import time
from pathlib import Path

import pytest

from mxtrain.data import cache_folders
from mxtrain.data.cache_folders import BUILDING, LEFTOVER_SECONDS, courtesy_lock, last_change, new_folder
from mxtrain.data.documents import Progress

SILENT = Progress(lambda line: None)


def is_complete(folder: Path) -> bool:
    return (folder / "complete").exists()


def build(folder: Path, content: str) -> None:
    with new_folder(folder, is_complete) as building:
        (building / "complete").write_text(content)


def test_a_folder_appears_whole(tmp_path):
    folder = tmp_path / "a"
    with new_folder(folder, is_complete) as building:
        (building / "complete").write_text("one")
        assert not folder.exists() and building.parent == tmp_path
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert (folder / "complete").read_text() == "one"


def test_the_first_of_two_builders_wins_without_a_lock(tmp_path):
    folder = tmp_path / "a"
    with new_folder(folder, is_complete) as late:
        (late / "complete").write_text("late")
        build(folder, "early")
    assert (folder / "complete").read_text() == "early"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_folder_that_is_not_complete_is_replaced(tmp_path):
    folder = tmp_path / "a"
    folder.mkdir()
    (folder / "rest").write_text("of something")
    build(folder, "new")
    assert [path.name for path in folder.iterdir()] == ["complete"]
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_failure_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a", is_complete):
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match="No such file or directory"):
        build(tmp_path / "none" / "a", "new")


def test_a_long_build_that_still_writes_a_file_is_no_leftover(tmp_path):
    """A folder's own time changes only when a file comes or goes."""
    building = tmp_path / f"a{BUILDING}-0"
    (building / "tokenizer").mkdir(parents=True)
    (building / "train.bin").write_bytes(b"half")
    long_ago = time.time() - 2 * LEFTOVER_SECONDS
    for path in (building, building / "tokenizer"):
        os.utime(path, (long_ago, long_ago))
    build(tmp_path / "a", "new")
    assert building.exists()
    os.utime(building / "train.bin", (long_ago, long_ago))
    build(tmp_path / "a", "newer")
    assert not building.exists()


def test_the_lock_lets_one_in_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_folders, "POLL_SECONDS", 0.01)
    inside, most = [], []

    def enter() -> None:
        with courtesy_lock(tmp_path / "a", SILENT):
            inside.append(1)
            most.append(len(inside))
            threading.Event().wait(0.05)
            inside.pop()

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1, 1] and list(tmp_path.iterdir()) == []


def test_where_locks_do_not_work_there_is_no_lock(tmp_path, monkeypatch):
    def no_locks(*args):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(cache_folders.fcntl, "flock", no_locks)
    with courtesy_lock(tmp_path / "a", SILENT), courtesy_lock(tmp_path / "a", SILENT):
        pass
    with courtesy_lock(tmp_path / "no" / "such" / "folder", SILENT):
        pass


def test_the_last_change_is_that_of_the_newest_file(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a").write_text("")
    assert last_change(tmp_path) == max(path.stat().st_mtime for path in (tmp_path, *tmp_path.rglob("*")))
    assert last_change(tmp_path / "none") == 0.0


def test_a_folder_that_vanishes_while_it_is_read(tmp_path, monkeypatch):
    """Another process may rename its unfinished folder at any time."""
    (tmp_path / "in").mkdir()
    scandir = os.scandir

    def vanish(path):
        if Path(path).name == "in":
            raise FileNotFoundError(2, "No such file or directory", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", vanish)
    assert last_change(tmp_path) > 0 and last_change(tmp_path / "in") > 0


def test_leftovers_are_those_of_the_same_name(tmp_path):
    for name in ("m[1]", "m1"):
        leftover = tmp_path / f"{name}{BUILDING}0"
        leftover.mkdir()
        os.utime(leftover, (0, 0))
    with new_folder(tmp_path / "m[1]", is_complete) as building:
        assert {path.name for path in tmp_path.iterdir()} == {f"m1{BUILDING}0", building.name}
