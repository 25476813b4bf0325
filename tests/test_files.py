from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mxtrain.errors import ConfigError
from mxtrain.files import cache_folder, new_folder, replace_file


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, full_disk):
    path = tmp_path / "file"
    replace_file(path, b"old")
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        replace_file(path, b"x" * 1000)
    assert path.read_bytes() == b"old" and list(tmp_path.iterdir()) == [path]
    replace_file(path, b"new")
    assert path.read_bytes() == b"new" and list(tmp_path.iterdir()) == [path]


def test_two_that_write_at_a_time_leave_one_whole_file(tmp_path):
    path, contents = tmp_path / "file", [bytes([letter]) * 200_000 for letter in b"ab"]
    replace_file(path, contents[0])
    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(lambda c=c: [replace_file(path, c) for _ in range(50)]) for c in contents]
        while not all(writer.done() for writer in writers):
            assert path.read_bytes() in contents
    for writer in writers:
        writer.result()  # raises what the writer raised
    assert list(tmp_path.iterdir()) == [path]


def is_complete(folder: Path) -> bool:
    return (folder / "complete").exists()


def build(folder: Path, content: str) -> None:
    with new_folder(folder, is_complete) as building:
        (building / "complete").write_text(content)
        assert not is_complete(folder) and building.parent == folder.parent


def names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


def test_a_folder_appears_whole_and_replaces_one_that_is_not(tmp_path):
    folder = tmp_path / "a"
    for content in ("one", "two"):
        build(folder, content)
        assert (
            (folder / "complete").read_text() == content and names(tmp_path) == ["a"] and names(folder) == ["complete"]
        )
        (folder / "complete").rename(folder / "rest")


def test_the_first_of_two_builders_wins_without_a_lock(tmp_path):
    folder = tmp_path / "a"
    with new_folder(folder, is_complete) as late:
        (late / "complete").write_text("late")
        build(folder, "early")
    assert (folder / "complete").read_text() == "early" and names(tmp_path) == ["a"]


def test_a_folder_that_fails_leaves_nothing(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_folder(tmp_path / "a", is_complete):
        raise KeyboardInterrupt
    assert names(tmp_path) == []
    with pytest.raises(OSError, match="No such file or directory"):
        build(tmp_path / "none" / "a", "new")


def test_a_user_without_a_home_needs_to_name_a_folder(monkeypatch, tmp_path):
    def no_user(number):
        raise KeyError(number)

    monkeypatch.setattr("pwd.getpwuid", no_user)
    for name in ("HOME", "MXTRAIN_CACHE"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"^\$MXTRAIN_CACHE: ~/.cache/mxtrain cannot be found .* set it to a folder$"):
        cache_folder()
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path))
    assert cache_folder() == tmp_path


def test_an_address_is_refused(monkeypatch):
    monkeypatch.setenv("MXTRAIN_CACHE", "gs://bucket/cache")
    with pytest.raises(ConfigError, match=r"^\$MXTRAIN_CACHE: gs://bucket/cache cannot be found .is an address"):
        cache_folder()
