"""Lets the ranks of a run do something together and know its results, or fail together with one message.

Ranks exchange a few bytes through the store by which they meet, also before torch.distributed has started. A collective
would not do: preparing a text may take hours, longer than any timeout of a process group, and must also work before a
GPU is used. Only ``gather``, for checkpoints and diagnostics, is a collective.
"""

import json
import logging
import os
import socket
import time
from collections.abc import Callable
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from mxtrain.errors import ConfigError

NOTE_SECONDS = 10.0
"""Interval between progress lines of a rank that waits"""

LATE_SECONDS = (0.0, 1.0, 4.0, 15.0, 40.0)
"""Pauses before ranks look again for what some of them do not see. NFS keeps lists of files for up to a minute."""

GOODBYE_SECONDS = 30.0
"""How long rank 0, which may hold the store, waits until all ranks have read the results"""

note: Callable[[str], None] = logging.getLogger(__name__).info
"""Gets the progress lines. The trainer shows them on the terminal"""


class CommonError(ConfigError):
    """A mistake in the settings that every rank knows, so that one of each node can report it."""


def run_on_all_ranks(work: Callable[[], object] | None) -> list[dict]:
    """Call ``work`` and return the results of all ranks, with their nodes: {"node": ..., "result": ...}.

    Args:
        work: what this rank does; its result must be a JSON value. None: nothing, and the result is None.

    Raises:
        CommonError: ``work`` raised ConfigError on some rank. Every rank raises the same error.
        RuntimeError: ``work`` raised another exception on another rank.
    """
    mine, failure = {"node": this_node(), "result": None, "error": None, "is_setting": False}, None
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
        raise CommonError(rank["error"] + where) from failure
    return ranks


def from_first_rank(work: Callable[[], object]) -> object:
    """Call ``work`` on rank 0 and return its result, a JSON value, on all ranks. Errors as in ``run_on_all_ranks``."""
    return run_on_all_ranks(work if is_first() else None)[0]["result"]


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


def this_node() -> str:
    """Return the host's name, with torchrun's number of the node if several nodes share a host."""
    number = os.environ.get("GROUP_RANK", "0")
    return socket.gethostname() + ("" if number == "0" else f" (node {number})")


def _is_alone() -> bool:
    if dist.is_initialized():
        return dist.get_world_size() == 1 or dist.get_backend() == "fake"  # which imitates many ranks with one process
    return os.environ.get("WORLD_SIZE", "1") == "1"


@cache
def _store(port: str) -> dist.Store:
    """Return the store at ``$MASTER_ADDR:port``, as init_process_group makes it."""
    return next(dist.rendezvous("env://", timeout=timedelta(minutes=30)))[0]


def _exchange(value: dict) -> list[dict]:
    """Return the values of all ranks, in the order of the ranks."""
    if _is_alone():
        return [value]
    store, rank, world = _store(os.environ["MASTER_PORT"]), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    name = f"mxtrain/{store.add(f'mxtrain/exchanges/{rank}', 1)}"
    store.set(f"{name}/{rank}", json.dumps(value))
    keys = {f"{name}/{other}": other for other in range(world)}
    _wait_for(store, keys)
    values = [json.loads(store.get(key)) for key in keys]
    store.add(f"{name}/readers", 1)
    end = time.monotonic() + GOODBYE_SECONDS
    while rank == 0 and store.add(f"{name}/readers", 0) < world and time.monotonic() < end:
        time.sleep(0.01)
    return values


def _wait_for(store, keys: dict[str, int]) -> None:
    """Wait until each rank has set its key. A launcher stops all ranks soon after one has died."""
    # Not ``store.wait``, which cannot be interrupted.
    start, pause, next_line = time.monotonic(), 0.01, NOTE_SECONDS
    while keys := {key: rank for key, rank in keys.items() if not store.check([key])}:
        if (waited := time.monotonic() - start) > next_line:
            note(f"waiting for rank {', '.join(map(str, keys.values()))}, {waited:,.0f} s")
            next_line += NOTE_SECONDS
        time.sleep(pause)
        pause = min(1.0, 1.2 * pause)
