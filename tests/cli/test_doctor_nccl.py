"""``mxtrain doctor --nccl``: as a user starts it, and in forked ranks that are wrong, late or absent."""

import os
import time
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from mxtrain import cli
from mxtrain.cli import doctor_nccl
from mxtrain.cli.doctor_nccl import bandwidths, difference, scopes
from tests.support.forked import Forked


def rank(name: str, words: list[str], timeout: float) -> int:
    """Check as one rank of several, with short tensors. ``name`` says what is wrong with rank 1."""
    doctor_nccl.SIZES, doctor_nccl.GRACE_SECONDS = {"gloo": (4096, 4096 * 3)}, 0
    number, original = int(os.environ["RANK"]), dist.all_reduce
    if number == 1 and name == "wrong":

        def wrong(tensor, group):
            original(tensor, group=group)
            tensor[5] += 1

        dist.all_reduce = wrong
    if name == "hangs":
        doctor_nccl.ranks = SimpleNamespace()  # only a collective is short of time
    if number == 1 and name == "hangs":
        dist.all_gather_into_tensor = lambda *arguments, group: time.sleep(60)
    return doctor_nccl.check(words, timeout)


def checked(folder, name: str, nodes: list[int], *flags: str, absent=(), timeout=30.0) -> list[tuple[int, list[str]]]:
    """Return exit status and lines of stdout, else stderr, of ranks on these nodes; rank 1 alone has the flags."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    world = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "WORLD_SIZE": str(len(nodes)), "LOCAL_WORLD_SIZE": str(nodes.count(0)),
    }  # fmt: skip
    ranks = []
    for number, node in enumerate(nodes):
        if number in absent:
            continue
        (folder / str(number)).mkdir()
        own = {"RANK": str(number), "GROUP_RANK": str(node), "LOCAL_RANK": str(nodes[:number].count(node))}
        words = ["llama3_debug", *(flags if number == 1 else ())]
        ranks.append(Forked(rank, name, words, timeout, cwd=folder / str(number), **world, **own))
    outputs = [each.communicate() for each in ranks]
    return [(each.process.exitcode, (out or err).splitlines()) for each, (out, err) in zip(ranks, outputs)]


def test_alone_it_starts_two_processes_on_a_cpu(monkeypatch, capfd):
    monkeypatch.delenv("NGPU", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert cli.main(["doctor", "--nccl"]) == 0
    lines = capfd.readouterr().out.splitlines()
    rows = [line.split() for line in lines if line.startswith("all ")]
    assert [row[1] for row in rows] == ["all-reduce", "all-gather", "reduce-scatter"]
    assert all(float(number) > 0 for row in rows for number in row[2:]) and {len(row) for row in rows} == {5}
    assert lines[-1] == "passed: 2 processes on 1 node have the same versions, and exact sums"


def test_two_nodes_with_two_processes_each(tmp_path):
    (status, lines), *others = checked(tmp_path, "right", [0, 0, 1, 1])
    assert (status, [other for other, _ in others]) == (0, [0] * 3)
    assert lines[-1] == "passed: 4 processes on 2 nodes have the same versions, and exact sums"
    for scope in ("all", "within a node", "between nodes"):
        assert sum(line.startswith(scope) for line in lines) == 3
    assert "  config      llama3_debug" in lines


@pytest.mark.parametrize(
    "name, flags, status, says",
    [
        ("wrong", [], 1, "failed: rank 1 on {} failed: all-reduce of 0.00390625 MiB (all): 1 of 1,024 elements are"),
        ("hangs", [], 1, "failed: all-gather of 0.00390625 MiB (all) has not ended after 2 s on {}; NCCL_DEBUG=INFO"),
        ("other", ["--mxnorm.p", "1"], 1, "failed: mxnorm.p is 1 on rank 1 ({}), but 2 on rank 0 ({})"),
        ("mistake", ["--mxnorm.p", "3"], 2, "mxtrain: error: mxnorm.p = '3' should be 1 or 2"),
    ],
)
def test_a_rank_that_is_wrong_is_named(name, flags, status, says, tmp_path):
    (first, lines), (second, _) = checked(tmp_path, name, [0, 0], *flags, timeout=2 if name == "hangs" else 30)
    assert (first, second) == (status, status)
    assert lines[-1].startswith(says.format(*[os.uname().nodename] * 2)), lines[-1]


def test_ranks_that_do_not_come_are_named_on_all_nodes(tmp_path):
    found = checked(tmp_path, "absent", [0, 0, 1, 1], absent=(1, 3), timeout=2)
    assert [status for status, _ in found] == [1, 1]
    assert {lines[-1] for _, lines in found} == {"failed: no answer from rank 1, 3 after 2 s"}


def test_one_process_is_refused(monkeypatch, capsys):
    monkeypatch.setenv("NGPU", "1")
    assert cli.main(["doctor", "--nccl"]) == 2
    assert "one process exchanges nothing" in capsys.readouterr().err


def test_groups_of_ranks():
    assert scopes(["a", "a"]) == {"all": [[0, 1]]}
    assert scopes(["a", "b"]) == {"all": [[0, 1]]}
    assert scopes(["a", "a", "b", "b"]) == {
        "all": [[0, 1, 2, 3]], "within a node": [[0, 1], [2, 3]], "between nodes": [[0, 2], [1, 3]],
    }  # fmt: skip
    assert scopes(["a", "a", "b"]) == {"all": [[0, 1, 2]], "within a node": [[0, 1]], "between nodes": [[0, 2]]}


def test_bus_bandwidth_is_that_of_nccl_tests():
    """By hand: 8 GB in 4 s are 2 GB/s, times 2 * 3/4 or 3/4 of four ranks. The slowest rank and group count."""
    times = {"all-reduce": [4.0], "all-gather": [4.0], "reduce-scatter": [4.0]}
    fast = {name: [1.0] for name in times}
    assert bandwidths("all", [[0, 1, 2, 3]], ["a"] * 4, (8 * 10**9,), [fast, times, fast, fast]) == [
        ("all", "all-reduce", "3", ""), ("all", "all-gather", "1.5", ""), ("all", "reduce-scatter", "1.5", ""),
    ]  # fmt: skip
    rows = bandwidths("within a node", [[0, 1], [2, 3]], ["a", "a", "b", "b"], (8 * 10**9,), [fast, fast, fast, times])
    assert rows[0] == ("within a node", "all-reduce", "2", "b")


def test_what_differs_is_named():
    one = {"versions": {"torch": "2.13"}, "settings": {"a": "1"}, "gpu": "x"}
    assert difference(["n0", "n1"], [one, {**one, "gpu": "y"}]) is None
    assert difference(["n0", "n0"], [one, one]) == "ranks 0 and 1 (n0) have the same GPU"
    other = {**one, "versions": {"torch": "2.12"}, "gpu": "y"}
    assert difference(["n0", "n1"], [one, other]) == "torch is 2.12 on rank 1 (n1), but 2.13 on rank 0 (n0)"
    fewer = {**one, "settings": {}, "gpu": "y"}
    assert difference(["n0", "n1"], [one, fewer]) == "a is unset on rank 1 (n1), but 1 on rank 0 (n0)"
