"""What the ranks of a run agree on before they train: settings and data. They fail together, with one message."""

from collections.abc import Callable

import torch

from mxtrain.data.store import Prepared, differences
from mxtrain.errors import ConfigError
from mxtrain.ranks import from_first_rank, is_first_of_node, run_on_all_ranks, this_node
from mxtrain.settings.fields import Settings
from mxtrain.settings.layout import global_batch_size
from mxtrain.settings.resume import changes, settings_before


def require_same_settings(settings: Settings, resolved: dict) -> None:
    """Compare the settings of all ranks. All must call it, in a process group. ``resolved``: as in ``config.toml``.

    Every node of a run has its own launcher, and so its own command. With another learning rate or recipe on one node,
    the run would train on, and its folder would have the settings of rank 0 only. Except for the layout, settings that
    a resumed run may change freely may also differ: folders, logs, the paths of texts that have a hash.

    Raises:
        ConfigError: another setting differs on two ranks. The same error on every rank.
    """
    first = settings_before(from_first_rank(lambda: resolved), settings.known)

    def compare() -> None:
        own = settings_before(resolved, settings.known)
        processes = torch.distributed.get_world_size()
        # Ranks with different layouts would wait for one another.
        layout = [name for name in own.known if name.startswith("parallelism.") and first[name] != own[name]]
        found = [(name, first[name], own[name]) for name in layout]
        batches = (global_batch_size(each, processes) for each in (first, own))
        found += [(change.name, change.old, change.new) for change in changes(first, own, *batches)]
        if found:
            (name, theirs, ours), *more = found
            also = f"; these differ, too: {', '.join(other[0] for other in more)}" if more else ""
            raise ConfigError(
                f"{name} = {ours!r}, but {theirs!r} on rank 0: start all nodes with the same config and flags{also}"
            )

    run_on_all_ranks(compare)


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
