"""Several processes with a gloo group prepare their data, on nodes that are simulated by their environment."""

import json
import os
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from mxtrain import ranks
from mxtrain.data import DataConfig, prepared
from mxtrain.errors import ConfigError
from mxtrain.ranks import is_first, run_on_all_ranks
from mxtrain.titan import data as titan_data
from tests.support.forked import forking_context
from tests.support.training_worker import free_port

SETTING = "training.dataset = 'files'"


def ranks_of(scenarios: list, nodes: int, ranks_per_node: int, folder: Path) -> list[list]:
    """Call each ``scenario(node, local_rank, folder)`` in every rank.

    Returns what each rank returned, or its error on one line, scenario after scenario.
    """
    context = forking_context()
    queue = context.Queue()
    args = (scenarios, nodes * ranks_per_node, ranks_per_node, folder, free_port(), queue)
    workers = [context.Process(target=_rank, args=(rank, *args)) for rank in range(nodes * ranks_per_node)]
    for worker in workers:
        worker.start()
    results = dict(queue.get(timeout=100) for _ in workers)
    for worker in workers:
        worker.join(30)
    return [list(of_all) for of_all in zip(*(results[rank] for rank in range(len(workers))), strict=True)]


def _rank(rank: int, scenarios: list, world: int, ranks_per_node: int, folder: Path, port: str, queue) -> None:
    node, local_rank = divmod(rank, ranks_per_node)
    os.environ.update(
        LOCAL_RANK=str(local_rank), GROUP_RANK=str(node), HOME=str(folder),
        RANK=str(rank), WORLD_SIZE=str(world), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
    )  # fmt: skip
    results = []
    for scenario in scenarios:
        # Much shorter than the slow scenario takes, as preparing may take longer than the timeout of a process group.
        if scenario is not before_the_group and not dist.is_initialized():
            dist.init_process_group("gloo", timeout=timedelta(seconds=20))
        os.environ["MXTRAIN_CACHE"] = str(folder / scenario.__name__ / f"home{node}")
        try:
            results.append(scenario(node, local_rank, folder / scenario.__name__))
        except (ConfigError, RuntimeError, KeyError) as error:
            results.append(f"{type(error).__name__}: {error}")
    queue.put((rank, results))
    queue.close()
    queue.join_thread()


def write(path: Path, count: int = 30) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({"text": f"row {i} of a small text"}) + "\n" for i in range(count)))


def prepared_on(node: int, folder: Path, local_rank: int, **fields) -> dict:
    """Prepare the node's own files, and return the identity, and how often this rank built them."""
    calls, build = {"built": 0}, prepared._build

    def counted(*args):
        calls["built"] += 1
        return build(*args)

    prepared._build = counted
    config = DataConfig(dataset="files", path=str(folder / f"node{node}" / "a.jsonl"), vocab_size=300, **fields)
    result = titan_data._prepare(config, lambda line: None)
    assert result.train[:1] == [0]
    return {"identity": result.identity, **calls}


def same_files(node, local_rank, folder):
    return prepared_on(node, folder, local_rank)


def other_files(node, local_rank, folder):
    return prepared_on(node, folder, local_rank)


def a_missing_file(node, local_rank, folder):
    return prepared_on(node, folder, local_rank)


def one_cache(node, local_rank, folder):
    return prepared_on(0, folder, local_rank, cache_dir=str(folder / "shared"))


def unexpected(node, local_rank, folder):
    def work():
        if node == 1:
            raise KeyError("a bug")

    return run_on_all_ranks(work)


def before_the_group(node, local_rank, folder):
    def work():
        if node == 0:
            raise ConfigError("a mistake")

    return run_on_all_ranks(work)


def slow_rank_0(node, local_rank, folder):
    def work():
        time.sleep(1.0 if node == 0 else 0.0)
        return {"node": node}

    lines = []
    ranks.NOTE_SECONDS, ranks.note = 0.3, lines.append
    return [rank["result"] for rank in run_on_all_ranks(work)], lines


@pytest.fixture(scope="module")
def two_nodes(tmp_path_factory):
    """Name of each scenario -> its folder, and what both ranks of a run on two nodes returned."""
    folder = tmp_path_factory.mktemp("two nodes")
    write(folder / "a_missing_file" / "node0" / "a.jsonl")
    write(folder / "one_cache" / "node0" / "a.jsonl")
    scenarios = [before_the_group, unexpected, slow_rank_0, a_missing_file, one_cache]
    results = ranks_of(scenarios, 2, 1, folder)
    names = [scenario.__name__ for scenario in scenarios]
    return {name: (folder / name, result) for name, result in zip(names, results, strict=True)}


def test_one_rank_of_each_node_prepares_the_text(tmp_path):
    for node in range(2):
        write(tmp_path / "same_files" / f"node{node}" / "a.jsonl")
        # The contents count, not the times.
        os.utime(tmp_path / "same_files" / f"node{node}" / "a.jsonl", (node, node))
        write(tmp_path / "other_files" / f"node{node}" / "a.jsonl", 30 + node)
    results, errors = ranks_of([same_files, other_files], 2, 2, tmp_path)
    assert [result["built"] for result in results] == [1, 0] * 2
    assert len({json.dumps(result["identity"]) for result in results}) == 1
    assert {path.name for path in (tmp_path / "same_files").glob("home*")} == {"home0", "home1"}
    host = socket.gethostname()
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"CommonError: {SETTING} gives other data than on node {host} (")
    assert "training text " in errors[0] and errors[0].endswith(f"(on node {host} (node 1))")


def test_a_missing_file_on_one_node_is_the_same_error_everywhere(two_nodes):
    folder, errors = two_nodes["a_missing_file"]
    assert len(set(errors)) == 1
    assert errors[0].startswith(f"CommonError: training.dataset_path = '{folder / 'node1' / 'a.jsonl'}' does not")
    assert errors[0].endswith(f"(on node {socket.gethostname()} (node 1))")


def test_two_nodes_share_a_cache(two_nodes):
    folder, (one, two) = two_nodes["one_cache"]
    assert one["identity"] == two["identity"]
    assert len(list((folder / "shared").glob("files-*/"))) == 1  # no unfinished folder is left


def test_a_bug_on_one_rank_does_not_leave_the_others_waiting(two_nodes):
    _, errors = two_nodes["unexpected"]
    assert errors[0].startswith("RuntimeError: rank 1 on ") and "a bug" in errors[0]
    assert errors[1] == "KeyError: 'a bug'"


def test_a_mistake_is_known_to_all_before_torch_distributed_has_started(two_nodes):
    assert two_nodes["before_the_group"][1] == [f"CommonError: a mistake (on node {socket.gethostname()})"] * 2


def test_ranks_wait_for_the_slowest(two_nodes):
    (first, none), (second, lines) = two_nodes["slow_rank_0"][1]
    assert first == second == [{"node": 0}, {"node": 1}]
    assert none == [] and lines
    assert lines[0] == "waiting for rank 0, 0 s"


def test_one_process_needs_no_group():
    assert not dist.is_initialized()
    with pytest.raises(ConfigError, match="^my own words$"):
        run_on_all_ranks(lambda: (_ for _ in ()).throw(ConfigError("my own words")))
    assert run_on_all_ranks(lambda: {"a": 1})[0]["result"] == {"a": 1}


def test_the_first_rank_is_known_before_and_after_the_ranks_have_met(monkeypatch):
    for rank, expected in (("1", False), ("0", True), (None, True)):
        monkeypatch.delenv("RANK", raising=False) if rank is None else monkeypatch.setenv("RANK", rank)
        assert is_first() == expected
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 1)
    assert not is_first(), "without torchrun's variables"
