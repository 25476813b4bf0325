"""Lets the ranks of a run prepare their data together and agree on it, or fail together with one message.

Ranks exchange a few bytes through the store with which torch.distributed started. A collective would not do: preparing
may take hours, longer than any timeout of a process group, and must also work before a GPU is used. Only ``gather``,
for checkpoints, is a collective.
"""

import json
import os
import socket
import time
from collections.abc import Callable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from mxtrain.data.store import Prepared, differences
from mxtrain.errors import ConfigError
from mxtrain.reports.terminal import note_progress

PATIENCE_SECONDS = 24 * 3600.0
"""How long a rank waits for the others. A launcher stops all ranks soon after one has died."""

NOTE_SECONDS = 10.0
"""Interval between progress lines of a rank that waits"""

LATE_SECONDS = (0.0, 1.0, 4.0, 15.0, 40.0)
"""Pauses before all ranks look again for what some of them do not see. NFS keeps lists of files for up to a minute."""

GOODBYE_SECONDS = 30.0
"""How long rank 0, which may hold the store, waits until all ranks have read the results"""


def prepare_together(prepare: Callable[[str], Prepared], setting: str) -> Prepared:
    """Prepare the data once on each node, load it on all ranks, and check that all ranks have the same.

    Local rank 0 of each node calls ``prepare("")``, which may read the sources and build. Then the other ranks call
    ``prepare(folder)`` with the folder in the cache that their local rank 0 prepared. Without torch.distributed this
    is ``prepare("")``.

    Args:
        prepare: takes the folder of a prepared text, or "" to prepare it.
        setting: name and value of the setting that selects the data, for error messages.

    Raises:
        ConfigError: ``prepare`` raised it on some rank, or nodes have different data. The same error on every rank.
    """
    prepared = []

    def work(folder: str) -> dict:
        prepared.append(prepare(folder))
        return {"folder": str(prepared[0].folder or ""), "identity": prepared[0].identity}

    ranks = run_on_all_ranks((lambda: work("")) if is_first_of_node() else None)
    node = _node()
    folder = next((rank["result"]["folder"] for rank in ranks if rank["result"] and rank["node"] == node), "")
    ranks = run_on_all_ranks(None if is_first_of_node() else lambda: work(folder), ranks)
    _require_same(ranks, setting)
    return prepared[0]


def run_on_all_ranks(work: Callable[[], dict | None] | None, before: list[dict] | None = None) -> list[dict]:
    """Call ``work`` and return the results of all ranks, with their nodes: {"node": ..., "result": ...}.

    Args:
        work: what this rank does; its result must be a JSON value. None: nothing, and the result is None.
        before: an earlier return value; its results stay where this call has None.

    Raises:
        ConfigError: ``work`` raised ConfigError on some rank. Every rank raises the same error.
        RuntimeError: ``work`` raised another exception on another rank.
    """
    mine, failure = {"node": _node(), "result": None, "error": None, "is_setting": False}, None
    try:
        mine["result"] = work() if work else None
    except Exception as error:  # the other ranks must not wait for this one
        failure = error
        mine.update(error=str(error) or type(error).__name__, is_setting=isinstance(error, ConfigError))
    ranks = _exchange(mine)
    for number, rank in enumerate(ranks):
        if rank["error"] is None:
            continue
        if failure is not None and not isinstance(failure, ConfigError):
            raise failure
        if not rank["is_setting"]:
            raise RuntimeError(f"rank {number} on {rank['node']} failed: {rank['error']}")
        where = f" (on node {rank['node']})" if len({other["node"] for other in ranks}) > 1 else ""
        raise ConfigError(rank["error"] + where) from failure
    for rank, earlier in zip(ranks, before or [], strict=False):
        rank["result"] = rank["result"] or earlier["result"]
    return ranks


def look_together(look: Callable[[], dict]) -> list[dict]:
    """Call ``look``, and again for a minute while ranks find different things. Return all results, as run_on_all_ranks.

    A network file system may show a node late what another one has written.
    """
    for pause in LATE_SECONDS:
        time.sleep(pause)
        ranks = run_on_all_ranks(look)
        if all(rank["result"] == ranks[0]["result"] for rank in ranks):
            break
    return ranks


def gather(value: object) -> list:
    """Return the values of all ranks, in the order of the ranks. All ranks must call it, and at about the same time."""
    if _is_alone():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def is_first() -> bool:
    """Return whether this is rank 0, or the only process, also before the ranks have met."""
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", "0"))) == 0


def is_first_of_node() -> bool:
    """Return whether this is the first rank of its launcher."""
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _require_same(ranks: list[dict], setting: str) -> None:
    first = ranks[0]
    for number, rank in enumerate(ranks):
        identity, expected = rank["result"]["identity"], first["result"]["identity"]
        if identity != expected:
            raise ConfigError(
                f"{setting}: rank {number} on node {rank['node']} has other data than rank 0 on node {first['node']}: "
                f"{differences(expected, identity)}; give all nodes the same files and packages, or prepare the text "
                "on one node in a data.cache_dir that all nodes see and name it in data.prepared"
            )


def _node() -> str:
    """Return the host's name, with torchrun's number of the node if several nodes share a host."""
    number = os.environ.get("GROUP_RANK", "0")
    return socket.gethostname() + ("" if number == "0" else f" (node {number})")


def _is_alone() -> bool:
    return not dist.is_initialized() or dist.get_backend() == "fake"  # which imitates many ranks with one process


def _exchange(value: dict) -> list[dict]:
    """Return the values of all ranks, in the order of the ranks."""
    if _is_alone():
        return [value]
    store, rank, world = _get_default_store(), dist.get_rank(), dist.get_world_size()
    name = f"mxtrain/{store.add(f'mxtrain/exchanges/{rank}', 1)}"
    store.set(f"{name}/{rank}", json.dumps(value))
    if rank == 0:
        values = [json.loads(_wait_for(store, f"{name}/{other}", other)) for other in range(world)]
        store.set(f"{name}/all", json.dumps(values))
    values = json.loads(_wait_for(store, f"{name}/all", 0))
    store.add(f"{name}/readers", 1)
    if rank == 0:
        end = time.monotonic() + GOODBYE_SECONDS
        while store.add(f"{name}/readers", 0) < world and time.monotonic() < end:
            time.sleep(0.01)
    return values


def _wait_for(store, key: str, rank: int) -> bytes:
    """Return the value that another rank sets."""
    # Not ``store.wait``, which cannot be interrupted.
    start, pause, next_line = time.monotonic(), 0.01, NOTE_SECONDS
    while not store.check([key]):
        waited = time.monotonic() - start
        if waited > PATIENCE_SECONDS:
            raise TimeoutError(f"rank {rank} has not prepared its data after {waited:,.0f} s")
        if waited > next_line:
            note_progress(f"waiting for rank {rank} to prepare its data, {waited:,.0f} s")
            next_line += NOTE_SECONDS
        time.sleep(pause)
        pause = min(1.0, 1.2 * pause)
    return store.get(key)
