from pathlib import Path

import pytest

from mxtrain.errors import ConfigError
from mxtrain.titan.hugging_face.target_folder import new_target


def test_the_folder_appears_when_it_is_complete(tmp_path):
    target = tmp_path / "new" / "out"
    with new_target(target, "DIR") as folder:
        (folder / "a").write_text("1")
        assert not target.exists()
    assert [path.name for path in target.parent.iterdir()] == ["out"] and (target / "a").read_text() == "1"


def test_an_empty_folder_is_taken(tmp_path):
    (tmp_path / "out").mkdir()
    with new_target(tmp_path / "out", "DIR") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()


def test_a_link_to_an_empty_folder_is_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to("real")
    with new_target(tmp_path / "out", "DIR") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out").is_symlink() and (tmp_path / "real" / "a").exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "real"]


def test_the_current_folder_is_refused_and_a_new_one_in_it_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="^DIR = '.' is the folder that you are in; choose another folder$"):
        with new_target(Path("."), "DIR"):
            raise AssertionError("too late")
    with new_target(Path("out"), "DIR") as folder:
        (folder / "a").touch()
    assert (tmp_path / "out" / "a").exists()


def test_a_file_elsewhere_is_named_itself(tmp_path):
    with pytest.raises(ConfigError) as caught, new_target(tmp_path / "out", "DIR"):
        (tmp_path / "source").read_bytes()
    assert str(caught.value) == f"{tmp_path / 'source'} cannot be read: No such file or directory"
    with pytest.raises(ConfigError, match="^DIR = '.*out' cannot be written: Is a directory$"):
        with new_target(tmp_path / "out", "DIR") as folder:
            (folder / "a").mkdir()
            (folder / "a").write_text("1")
    assert list(tmp_path.iterdir()) == []


def test_after_an_error_nothing_is_left(tmp_path):
    with pytest.raises(KeyboardInterrupt), new_target(tmp_path / "out", "DIR") as folder:
        (folder / "a").touch()
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == []


def folder_with_a_file(path):
    path.mkdir()
    (path / "a").touch()


@pytest.mark.parametrize(
    "make", [folder_with_a_file, lambda path: path.touch(), lambda path: path.symlink_to("nowhere")]
)
def test_what_exists_is_refused_before_anything_is_done(make, tmp_path):
    make(tmp_path / "out")
    with pytest.raises(ConfigError, match="^DIR = '.*out' exists; choose another folder, or remove it$"):
        with new_target(tmp_path / "out", "DIR"):
            raise AssertionError("too late")


def test_a_folder_that_appears_meanwhile_is_kept(tmp_path):
    with pytest.raises(ConfigError, match="RUN_DIR = '.*out' was written by another process meanwhile"):
        with new_target(tmp_path / "out", "RUN_DIR"):
            folder_with_a_file(tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out"] and (tmp_path / "out" / "a").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="^DIR = '.*file/out' cannot be written: "):
        with new_target(tmp_path / "file" / "out", "DIR"):
            pass


def test_a_full_disk_is_one_line(tmp_path, full_disk):
    with pytest.raises(ConfigError, match="cannot be written: File too large"), full_disk(10):
        with new_target(tmp_path / "out", "DIR") as folder:
            (folder / "a").write_bytes(b"0" * 100)
    assert list(tmp_path.iterdir()) == []
