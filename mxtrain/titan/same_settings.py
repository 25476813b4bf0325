"""Refuses a run whose nodes have different settings.

Every node of a run has its own launcher, and so its own command. With another learning rate or recipe on one node, the
run would train on, and its folder would have the settings of rank 0 only.
"""

import torch

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Settings
from mxtrain.settings.layout import global_batch_size
from mxtrain.settings.resume import SettingChange, changes, settings_before
from mxtrain.titan.agreement import is_first_of_node, run_on_all_ranks
from mxtrain.titan.parse import resolved_settings, settings_of


def require_same_settings(job_config) -> None:
    """Compare the settings of all nodes. All ranks must call it, in a process group.

    Except for the layout, settings that a resumed run may change freely may also differ between nodes: folders, logs,
    the paths of texts that have a hash.

    Raises:
        ConfigError: another setting differs on two nodes. The same error on every rank.
    """
    ranks = run_on_all_ranks((lambda: resolved_settings(job_config)) if is_first_of_node() else None)
    known = settings_of(job_config).known
    (first_node, first), *others = (
        (rank["node"], settings_before(rank["result"], known)) for rank in ranks if rank["result"] is not None
    )
    for node, settings in others:
        if found := _differences(first, settings):
            change, *more = found
            also = f"; these differ, too: {', '.join(change.name for change in more)}" if more else ""
            raise ConfigError(
                f"{change.name} = {change.new!r} on node {node}, but {change.old!r} on node {first_node}: start all "
                f"nodes with the same config and flags{also}"
            )


def _differences(first: Settings, other: Settings) -> list[SettingChange]:
    processes = torch.distributed.get_world_size()
    batches = [global_batch_size(settings, processes) for settings in (first, other)]
    # Ranks with different layouts would wait for one another.
    layout = [
        SettingChange(name, first[name], other[name])
        for name in first.known
        if name.startswith("parallelism.") and first[name] != other[name]
    ]
    return [*layout, *changes(first, other, *batches)]
