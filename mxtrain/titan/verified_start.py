"""Where a run starts, after all ranks have read its checkpoint's files once and compared their hashes.

A checkpoint whose files have other content than was saved is set aside, and the run starts from the newest whole one;
if the user asked for the damaged one by name, the run is refused.
"""

import os
from concurrent.futures import ThreadPoolExecutor
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
    """Return where the run in ``folder`` starts. Damaged checkpoints and those of later steps are set aside.

    All ranks must call it, after torch.distributed has started.

    Raises:
        ConfigError: as ``find_start``, and if a checkpoint that the user named is damaged. The same on every rank.
    """
    notes: tuple[str, ...] = ()
    world = dist.get_world_size()
    while (start := find_start(folder, checkpoint, world)).checkpoint is not None:
        damage = _damage(start.checkpoint)
        if damage is None:
            break
        if checkpoint.load_step != -1 or start.checkpoint.parent != folder / checkpoint.folder:
            setting = "load_step" if checkpoint.load_step != -1 else "initial_load_path"
            raise ConfigError(
                f"checkpoint.{setting} = {getattr(checkpoint, setting)!r}: {start.checkpoint} is damaged: {damage}"
            )
        (moved,) = _on_rank_0(partial(_set_aside, [start.checkpoint]))
        notes += (f"{start.checkpoint} is damaged ({damage}), and goes to {moved}",)
    _on_rank_0(lambda: clear_leftovers(folder / checkpoint.folder))
    _on_rank_0(partial(_set_aside, start.abandoned))
    return Start(start.step, notes + start.notes, start.checkpoint)


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


def _set_aside(checkpoints: list[Path]) -> list[str]:
    return [str(set_aside(path)) for path in checkpoints]


def _on_rank_0(work):
    return run_on_all_ranks(work if is_rank_0() else None)[0]["result"]
