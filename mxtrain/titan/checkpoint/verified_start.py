"""Where a run starts, after all ranks have read its checkpoint's files once and compared their hashes.

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
from mxtrain.run_folder.manifest import DamagedCheckpoint, check_hashes, read_manifest
from mxtrain.run_folder.start import CheckpointSettings, Start, find_start
from mxtrain.titan.agreement import is_rank_0, run_on_all_ranks

READERS = 8
"""Files that the ranks of one node read at a time"""


def verified_start(folder: Path, checkpoint: CheckpointSettings) -> Start:
    """Return where the run in ``folder`` starts. Damaged checkpoints are set aside if there is one that is whole.

    All ranks must call it, after torch.distributed has started.

    Raises:
        ConfigError: as ``find_start``; if a checkpoint that the user named is damaged, or all are. The same on every
            rank.
    """
    damaged: dict[str, str] = {}
    while (start := find_start(folder, checkpoint, dist.get_world_size(), damaged)).checkpoint is not None:
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
    _on_rank_0(lambda: clear_leftovers(folder / checkpoint.folder))
    _on_rank_0(lambda: [str(set_aside(path)) for path in aside])
    return replace(start, abandoned=tuple(path for path in start.abandoned if path not in aside))


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
    return run_on_all_ranks(work if is_rank_0() else None)[0]["result"]
