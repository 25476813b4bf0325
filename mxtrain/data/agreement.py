"""The ranks of a run prepare their text once per node, and check that all have the same."""

from collections.abc import Callable

from mxtrain.data.store import Prepared, differences
from mxtrain.errors import ConfigError
from mxtrain.ranks import is_first_of_node, run_on_all_ranks, this_node


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
    node = this_node()
    folder = next((rank["result"]["folder"] for rank in ranks if rank["result"] and rank["node"] == node), "")
    ranks = run_on_all_ranks(None if is_first_of_node() else lambda: work(folder), ranks)
    _require_same(ranks, setting)
    return prepared[0]


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
