"""Where a run starts, after all ranks together have read the files: damaged checkpoints, and nodes that differ."""

from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist

from mxtrain import ranks
from mxtrain.checkpoints import verified_start as module
from mxtrain.checkpoints.manifest import Manifest, write_manifest
from mxtrain.checkpoints.start import Start, find_start
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file
from mxtrain.run_folder.lock import locked
from tests.support.releases import Checkpoint

ON = Checkpoint(enable=True)


def verified_start(folder: Path, checkpoint: Checkpoint) -> Start:
    find = partial(find_start, folder, checkpoint, 1)
    return module.verified_start(folder, checkpoint, find, find())


@pytest.fixture(autouse=True)
def world(monkeypatch):
    """Ranks without a process group: each test says how many, and which one this is."""

    def set_world(rank, size):
        monkeypatch.setattr(dist, "get_rank", lambda: rank)
        monkeypatch.setattr(dist, "get_world_size", lambda: size)

    set_world(0, 1)
    return set_world


def save(run: Path, step: int, files: int = 2) -> Path:
    path = run / "checkpoint" / f"step-{step}"
    path.mkdir(parents=True)
    for number in range(files):
        (path / f"f{number}").write_bytes(b"content")
    write_manifest(path, Manifest(step, True, {f"f{n}": hash_file(path / f"f{n}") for n in range(files)}))
    return path


def flip(path: Path) -> None:
    path.write_bytes(b"cOntent")  # the size is right


def test_damaged_checkpoints_are_set_aside_and_the_newest_whole_one_is_taken(tmp_path):
    five, ten, fifteen, twenty = (save(tmp_path, step) for step in (5, 10, 15, 20))
    flip(ten / "f1")
    flip(fifteen / "f0")
    (twenty / "f0").unlink()
    (tmp_path / "checkpoint" / ".saving" / "step-25").mkdir(parents=True)
    start = verified_start(tmp_path, ON)
    assert (start.step, start.checkpoint, start.abandoned) == (5, five, (twenty,))
    aside = tmp_path / "checkpoint" / "set_aside"
    assert start.notes == (
        f"resuming after step 5, from {five}",
        f"{ten} cannot be loaded: f1 has other content than was saved",
        f"{fifteen} cannot be loaded: f0 has other content than was saved",
        f"{twenty} cannot be loaded: f0 is missing",
        f"checkpoints after step 5 go to {aside}: step-10, step-15, step-20",
    )
    # The trainer moves step-20 when step-5 is loaded.
    assert sorted(path.name for path in (tmp_path / "checkpoint").iterdir()) == ["set_aside", "step-20", "step-5"]
    assert sorted(path.name for path in aside.iterdir()) == ["step-10", "step-15"]


@pytest.mark.parametrize("step", [0, 5])
def test_if_all_are_damaged_nothing_starts_over_in_silence(tmp_path, step):
    path = save(tmp_path, step)
    flip(path / "f0")
    with pytest.raises(ConfigError) as error:
        verified_start(tmp_path, ON)
    assert str(error.value) == (
        f"checkpoint.folder: {path.parent} holds no whole checkpoint (step-{step}: f0 has other content than was saved)"
    )
    assert path.is_dir()


def test_a_damaged_checkpoint_that_was_named_is_refused(tmp_path):
    path = save(tmp_path / "run", 5)
    save(tmp_path / "run", 3)
    flip(path / "f1")
    problem = "cannot be loaded: f1 has other content than was saved"
    with pytest.raises(ConfigError) as error:
        verified_start(tmp_path / "run", Checkpoint(enable=True, load_step=5))
    assert str(error.value) == f"checkpoint.load_step = 5: {path} {problem}"
    with pytest.raises(ConfigError) as error:
        verified_start(tmp_path / "new", Checkpoint(enable=True, initial_load_path=str(path)))
    assert str(error.value) == f"checkpoint.initial_load_path = {str(path)!r} {problem}"
    assert path.is_dir()


@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_ranks_share_the_files(tmp_path, monkeypatch, world, size):
    path, read = save(tmp_path, 5, files=5), []
    monkeypatch.setattr(module, "check_hashes", lambda checkpoint, manifest, names: read.extend(names))
    for rank in range(size):
        world(rank, size)
        module._damage_in_share(path)
    assert sorted(read) == ["f0", "f1", "f2", "f3", "f4"]


def test_a_new_run_has_nothing_to_verify(tmp_path):
    assert verified_start(tmp_path / "new", ON).step == 0
    assert verified_start(tmp_path / "new", Checkpoint()).step == 0
    assert not (tmp_path / "new").exists()


@pytest.fixture
def second_node(monkeypatch):
    """A function that adds a rank on node "b". It takes what this rank finds, and returns what the other one does."""

    def add(sees):
        monkeypatch.setattr(module, "LATE_SECONDS", (0.0, 0.0, 0.0))
        monkeypatch.setattr(
            ranks, "_exchange", lambda mine: [mine, {**mine, "node": "b", "result": sees(mine["result"])}]
        )
        monkeypatch.setattr(ranks, "this_node", lambda: "a")

    return add


def require_refusal(run: Path, message: str) -> None:
    """The run is refused, and nothing in its folder has moved."""
    before = sorted(run.rglob("*"))
    with pytest.raises(ConfigError, match=message):
        verified_start(run, ON)
    assert sorted(run.rglob("*")) == before


def test_nodes_that_see_other_checkpoints_are_refused(tmp_path, second_node):
    """They would train on with a mixture of both."""
    save(tmp_path, 3)
    save(tmp_path, 6)

    def sees(name):
        return lambda mine: mine | {"name": name, "sha256": "abc"} if "sha256" in mine else mine

    second_node(sees("step-3"))
    require_refusal(tmp_path, "node a would start from step-6 and node b from step-3, .* all nodes must see the same")
    second_node(sees("no checkpoint"))
    require_refusal(tmp_path, "node a would start from step-6 and node b from no checkpoint")
    second_node(sees("step-6"))
    require_refusal(tmp_path, "node a would start from step-6 and node b from step-6, or from another with this name")


@pytest.mark.parametrize("owner", [None, "123 b"])
def test_nodes_with_folders_of_their_own_are_refused(tmp_path, second_node, owner):
    """Each would save its own part of every checkpoint."""
    with locked(tmp_path):
        second_node(lambda mine: mine | {"lock": owner} if "lock" in mine else mine)
        require_refusal(tmp_path, "no checkpoint and node b from no checkpoint, .* or in another folder: all nodes")
        second_node(lambda mine: mine)
        assert verified_start(tmp_path, ON).step == 0


def test_a_node_that_sees_a_checkpoint_late_starts_from_it(tmp_path, second_node):
    save(tmp_path, 6)
    looks = []

    def sees(mine):
        if mine and "sha256" in mine:
            looks.append(mine)
            return mine if len(looks) == 3 else mine | {"name": "no checkpoint", "sha256": None}
        return mine

    second_node(sees)
    assert verified_start(tmp_path, ON).step == 6 and len(looks) == 3
