from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from mxtrain.errors import ConfigError
from mxtrain.files import cache_folder, new_folder, read_json, read_toml, replace_file


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


# JSON and TOML: every fault is one line that names the file.

NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "read, content, problem",
    [
        (read_json, NESTED, "is not valid JSON: it is nested too deep"),
        (read_toml, f"a = {NESTED}", "is not valid TOML: it is nested too deep"),
        (read_json, b'{"a": "\xff"}', "is not valid JSON: 'utf-8' codec can't decode byte 0xff in position 7"),
        (read_json, '{"a": ' + "1" * 20_000 + "}", "is not valid JSON: Exceeds the limit"),
        (read_json, "[1]", "holds list, not dict"),
    ],
)
def test_bad_content(tmp_path, read, content, problem):
    path = tmp_path / "file"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    for name in ("", "MODEL_DIR: config.json"):
        with pytest.raises(ConfigError) as error:
            read(path, name)
        assert str(error.value).startswith(f"{name or path} {problem}") and "\n" not in str(error.value)


def test_a_missing_file_is_for_the_caller(tmp_path):
    with pytest.raises(FileNotFoundError):
        read_json(tmp_path / "file")


def test_good_files(tmp_path):
    path = tmp_path / "file"
    path.write_text('\ufeff{"a": [1, NaN, -Infinity]}', encoding="utf-8")  # with a BOM
    assert str(read_json(path)) == "{'a': [1, nan, -inf]}"
    path.write_text("\ufeffa.b = [1, nan]", encoding="utf-8")
    assert str(read_toml(path)) == "{'a': {'b': [1, nan]}}"
    path.write_text("[1]")
    assert read_json(path, kind=list) == [1]
