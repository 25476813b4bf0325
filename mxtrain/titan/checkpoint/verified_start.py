"""Where a run starts: at the same checkpoint on all nodes, whose files all ranks together have read and hashed.

A checkpoint whose files have other content than was saved is set aside, and the run starts from the newest whole one.
If the user asked for the damaged one by name, or there is no other, the run is refused and nothing is moved.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from mxtrain.errors import ConfigError
from mxtrain.run_folder.checkpoints import clear_leftovers, set_aside
from mxtrain.run_folder.lock import lock_owner
from mxtrain.run_folder.manifest import MANIFEST_FILE, DamagedCheckpoint, check_hashes, hash_file, read_manifest
from mxtrain.run_folder.start import CheckpointSettings, Start, begin_again, find_start
from mxtrain.titan.agreement import is_first, look_together, run_on_all_ranks

READERS = 8
"""Files that the ranks of one node read at a time"""


def verified_start(folder: Path, checkpoint: CheckpointSettings) -> Start:
    """Return where the run in ``folder`` starts. Damaged checkpoints are set aside if there is one that is whole.

    All ranks must call it, after torch.distributed has started.

    Raises:
        ConfigError: as ``find_start``; if nodes see different folders; if a checkpoint that the user named is damaged,
            or all are. The same on every rank.
    """
    if checkpoint.enable:
        _require_shared(folder)
    damaged: dict[str, str] = {}
    while (start := _same_start(folder, checkpoint, damaged)).checkpoint is not None:
        damage = _damage(start.checkpoint)
        if damage is None:
            break
        if start.checkpoint.parent != folder / checkpoint.folder:
            raise ConfigError(
                f"checkpoint.initial_load_path = {checkpoint.initial_load_path!r} cannot be loaded: {damage}"
            )
        damaged[start.checkpoint.name] = damage
    run_on_all_ranks(None)  # every rank has looked before anything moves
    aside = [folder / checkpoint.folder / name for name in damaged]
    again = _on_rank_0(lambda: begin_again(folder, checkpoint))
    _on_rank_0(lambda: clear_leftovers(folder / checkpoint.folder))
    _on_rank_0(lambda: [str(set_aside(path)) for path in aside])
    abandoned = tuple(path for path in start.abandoned if path not in aside)
    return replace(start, notes=(*again, *start.notes), abandoned=abandoned)


def _require_shared(folder: Path) -> None:
    """Raise ConfigError if a node does not see rank 0's lock: that node's parts of checkpoints would be elsewhere."""
    first, *others = look_together(lambda: {"owner": lock_owner(folder)})
    for rank in others:
        if rank["result"] != first["result"]:
            raise ConfigError(
                f"job.dump_folder = {str(folder)!r} is another folder on node {rank['node']} than on node "
                f"{first['node']}, so no checkpoint would be complete: give a folder that all nodes share"
            )


def _same_start(folder: Path, checkpoint: CheckpointSettings, damaged: dict[str, str]) -> Start:
    """Return what ``find_start`` finds. Raises ConfigError if other nodes find another checkpoint."""
    found = []

    def look() -> dict:
        found.append(start := find_start(folder, checkpoint, dist.get_world_size(), damaged))
        if start.checkpoint is None:
            return {"name": "no checkpoint", "sha256": None}
        return {"name": start.checkpoint.name, "sha256": hash_file(start.checkpoint / MANIFEST_FILE).sha256}

    first, *others = look_together(look)
    for rank in others:
        if rank["result"] != first["result"]:
            one, other = first["result"]["name"], rank["result"]["name"]
            another = "another " if other == one else ""
            raise ConfigError(
                f"node {first['node']} would start from {one} and node {rank['node']} from {another}{other}: all nodes "
                "must see the same files in job.dump_folder and checkpoint.initial_load_path"
            )
    return found[-1]


def _damage(checkpoint: Path) -> str | None:
    """Return what is wrong with a checkpoint's files, or None. Every rank reads its share of the files."""
    ranks = run_on_all_ranks(partial(_damage_in_share, checkpoint))
    return next((rank["result"]["damage"] for rank in ranks if rank["result"]["damage"]), None)


def _damage_in_share(checkpoint: Path) -> dict:
    try:
        manifest = read_manifest(checkpoint)
        names = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        readers = max(1, READERS // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(lambda name: check_hashes(checkpoint, manifest, [name]), names))
    except DamagedCheckpoint as error:
        return {"damage": str(error)}
    return {"damage": None}


def _on_rank_0(work):
    return run_on_all_ranks(work if is_first() else None)[0]["result"]
