import os
import time

import pytest

from mxtrain import cli
from mxtrain.data import DataConfig, prepare

DAY = 24 * 3600


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def texts(tmp_path, cache):
    """A used, an old and a damaged text, a leftover, and a folder of tuned plans."""

    def text(name: str):
        (tmp_path / name).write_text(f"a small text in {name}\n" * 200)
        config = DataConfig(dataset="files", path=str(tmp_path / name), vocab_size=300, validation_share=0.0)
        return prepare(config, lambda line: None).folder

    used, old, damaged = text("used.txt"), text("old.txt"), text("damaged.txt")
    (damaged / "train.bin").write_bytes(b"")
    leftover = old.with_name(old.name + ".building-0123456789ab")
    leftover.mkdir()
    for folder in (old, leftover):
        for path in (folder, *folder.rglob("*")):
            os.utime(path, (time.time() - 40 * DAY,) * 2)
    (cache / "rms_norm").mkdir()
    return {"used": used, "old": old, "damaged": damaged, "leftover": leftover}


def run(capsys, *arguments) -> list[str]:
    assert cli.main(["cache", *arguments]) == 0
    return capsys.readouterr().out.splitlines()


def test_the_list_shows_every_text_and_leftover(texts, cache, capsys):
    header, *lines, total = run(capsys)
    assert header.split() == ["name", "size", "last", "used", "dataset", "tokens", "state"]
    rows = {line.split()[0]: line for line in lines}
    assert rows.keys() == {path.name for path in texts.values()}
    assert rows[texts["used"].name].endswith(" ok") and " 0.0 days ago   files " in rows[texts["used"].name]
    assert " 40.0 days ago " in rows[texts["old"].name]
    assert "damaged: train.bin has 0 bytes instead of" in rows[texts["damaged"].name]
    assert "unfinished: " in rows[texts["leftover"].name]
    assert total.startswith(f"4 in {cache}, 0.")


def test_verify_reads_the_tokens(texts, capsys):
    file = texts["used"] / "train.bin"
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.write_bytes(content)
    rows = {line.split()[0]: line for line in run(capsys, "--verify")}
    assert rows[texts["used"].name].endswith(" damaged: the contents of train.bin have changed")
    assert rows[texts["old"].name].endswith(" verified")


def test_prune_removes_what_is_old(texts, cache, capsys):
    assert run(capsys, "--prune", "50") == ["nothing is older than 50 days"]
    lines = run(capsys, "--prune", "30")
    assert [line.split(",")[0] for line in lines] == [f"removed {texts[name].name}" for name in ("old", "leftover")]
    left = {path.name for path in cache.iterdir() if path.is_dir()}
    assert left == {texts["used"].name, texts["damaged"].name, "rms_norm"}


def test_prune_leaves_a_folder_that_is_being_built(texts, capsys):
    building = texts["used"].with_name(texts["used"].name + ".building-0123456789ab")
    building.mkdir()
    (building / "train.bin").write_bytes(b"half")
    (building / "gone").symlink_to("nowhere")  # as what another process has just removed
    os.utime(building, (0, 0))  # a folder's own time changes only when a file comes or goes
    run(capsys, "--prune", "0")
    assert building.exists() and not any(path.exists() for path in texts.values())


def test_a_link_in_the_place_of_a_text_stays(texts, capsys):
    link = texts["used"].with_name("files-0123456789abcdef")
    link.symlink_to(texts["used"])
    assert cli.main(["cache", "--remove", link.name]) == 2
    assert "Cannot call rmtree on a symbolic link" in capsys.readouterr().err and link.exists()


def test_loading_a_text_counts_as_use(texts, capsys):
    prepare(DataConfig(dataset="files", prepared=texts["old"].name), lambda line: None)
    assert [line.split(",")[0] for line in run(capsys, "--prune", "30")] == [f"removed {texts['leftover'].name}"]


def test_remove_by_name(texts, cache, capsys):
    (line,) = run(capsys, "--remove", texts["damaged"].name)
    assert line.startswith(f"removed {texts['damaged'].name}, ")
    assert not texts["damaged"].exists() and texts["used"].exists()


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--remove", "files-0"], "--remove: there is no 'files-0' in the cache; 'mxtrain cache' lists the names"),
        (["--remove", "rms_norm"], "--remove: there is no 'rms_norm' in the cache; 'mxtrain cache' lists the names"),
        (["--prune", "-1"], "--prune = -1.0 is not a number of days from 0"),
        (["--prune", "nan"], "--prune = nan is not a number of days from 0"),
        (["--cache-dir", "/no/such"], "--cache-dir = '/no/such' is not a folder"),
    ],
)
def test_mistakes_are_one_line_and_remove_nothing(texts, arguments, message, capsys):
    assert cli.main(["cache", *arguments]) == 2
    assert capsys.readouterr().err == f"mxtrain: error: {message}\n"
    assert all(path.exists() for path in texts.values())


def test_an_empty_cache(cache, capsys):
    assert run(capsys) == [f"0 in {cache}, 0.0 MB"]
    assert not cache.exists()
