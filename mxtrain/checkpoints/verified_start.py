"""Where a run starts: at the same checkpoint on all nodes, whose files all ranks together have read and hashed.

A checkpoint whose files have other content than was saved is set aside, and the run starts from the newest whole one.
If the user asked for the damaged one by name, or there is no other, the run is refused and nothing is moved.
"""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch.distributed as dist

from mxtrain.checkpoints.folder import clear_leftovers, set_aside
from mxtrain.checkpoints.manifest import MANIFEST_FILE, DamagedCheckpoint, check_hashes, read_manifest
from mxtrain.checkpoints.start import Start, begin_again
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file
from mxtrain.ranks import LATE_SECONDS, from_first_rank, is_first_of_node, run_on_all_ranks
from mxtrain.run_folder.lock import lock_owner

READERS = 8
"""Files that the ranks of one node read at a time"""


def verified_start(folder: Path, checkpoint, find: Callable[[dict[str, str]], Start], found: Start | None) -> Start:
    """Return where the run in ``folder`` starts. Damaged checkpoints are set aside if there is one that is whole.

    All ranks must call it, after torch.distributed has started.

    Args:
        checkpoint: the job's section ``[checkpoint]``.
        find: (names of damaged checkpoints -> what is wrong with them) -> where the run starts.
        found: what ``find({})`` has returned already, on the first rank of every node.

    Raises:
        ConfigError: as ``find``; if nodes see different folders; if a checkpoint that the user named is damaged, or
            all are. The same on every rank.
    """
    damaged: dict[str, str] = {}
    while True:
        start = _same_on_all_nodes(folder, checkpoint, partial(find, damaged), found)
        if start.checkpoint is None:
            break
        ranks = run_on_all_ranks(partial(_damage_in_share, start.checkpoint))
        damage = next((rank["result"]["damage"] for rank in ranks if rank["result"]["damage"]), None)
        if damage is None:
            break
        if start.checkpoint.parent != folder / checkpoint.folder:
            raise ConfigError(
                f"checkpoint.initial_load_path = {checkpoint.initial_load_path!r} cannot be loaded: {damage}"
            )
        damaged, found = {**damaged, start.checkpoint.name: damage}, None
    aside = [folder / checkpoint.folder / name for name in damaged]

    def clear() -> list[str]:
        again = begin_again(folder, checkpoint)
        clear_leftovers(folder / checkpoint.folder)
        for path in aside:
            set_aside(path)
        return list(again)

    again = from_first_rank(clear)
    abandoned = tuple(path for path in start.abandoned if path not in aside)
    return replace(start, notes=(*again, *start.notes), abandoned=abandoned)


def _same_on_all_nodes(folder: Path, checkpoint, find: Callable[[], Start], found: Start | None) -> Start:
    """Return where rank 0 finds that the run starts. Raises ConfigError if another node finds something else.

    A network file system may show a node late what another one has written, so all look again for a minute.
    """

    def look() -> dict:
        start = found or find()
        name, sha256 = "no checkpoint", None
        if start.checkpoint is not None:
            name, sha256 = start.checkpoint.name, hash_file(start.checkpoint / MANIFEST_FILE).sha256
        # A node that does not see rank 0's lock would save its parts of checkpoints elsewhere.
        lock = lock_owner(folder) if checkpoint.enable else None
        return {"start": start.to_json(), "name": name, "sha256": sha256, "lock": lock}

    for pause in LATE_SECONDS:
        time.sleep(pause)
        ranks = run_on_all_ranks(look if is_first_of_node() else None)
        first, *others = (rank for rank in ranks if rank["result"])
        seen = {key: first["result"][key] for key in ("name", "sha256", "lock")}
        other = next((node for node in others if not seen.items() <= node["result"].items()), None)
        if other is None:
            return Start.from_json(first["result"]["start"])
        found = None
    raise ConfigError(
        f"job.dump_folder = {str(folder)!r}: node {first['node']} would start from {first['result']['name']} and node "
        f"{other['node']} from {other['result']['name']}, or from another with this name or in another folder: all "
        "nodes must see the same files there and in checkpoint.initial_load_path"
    )


def _damage_in_share(checkpoint: Path) -> dict:
    """Return what is wrong with this rank's share of a checkpoint's files, or None."""
    try:
        manifest = read_manifest(checkpoint)
        names = sorted(manifest.files)[dist.get_rank() :: dist.get_world_size()]
        readers = max(1, READERS // int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
        with ThreadPoolExecutor(readers) as pool:
            list(pool.map(lambda name: check_hashes(checkpoint, manifest, [name]), names))
    except DamagedCheckpoint as error:
        return {"damage": str(error)}
    return {"damage": None}
