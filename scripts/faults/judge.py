"""What a kill must not do: change a loss, damage a checkpoint, lose a step that was saved."""

from pathlib import Path

from moments import Saved

from mxtrain.analysis.metrics_file import read_metrics
from mxtrain.checkpoints.folder import MANIFEST_FILE, check_hashes, check_sizes, read_manifest

COMPARED = ("loss", "grad_norm")


def curve(run: Path) -> dict[int, tuple[float, ...]]:
    """Return the loss and gradient norm of every step in a run's metrics."""
    path = run / "metrics.jsonl"
    rows = read_metrics(path) if path.exists() else []
    return {row["step"]: tuple(row[key] for key in COMPARED) for row in rows if "loss" in row}


def differing(run: Path, reference: dict[int, tuple[float, ...]]) -> list[int]:
    """Return the steps whose loss or gradient norm is not, bit for bit, that of the reference."""
    return [step for step, values in curve(run).items() if values != reference.get(step)]


def damaged(checkpoints: Path, saved: Saved) -> dict[str, str]:
    """Load every checkpoint that looks complete. Return the names of those that cannot be loaded, and why."""
    found = {}
    for name in (f"step-{step}" for step in sorted(saved.complete)):
        try:
            load(checkpoints / name)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # PyTorch's CheckpointException is no Exception
            lines = str(error).strip().splitlines()
            found[name] = f"{name}: {lines[-1] if lines else type(error).__name__}"
    return found


def load(checkpoint: Path) -> None:
    """Read all of a checkpoint: as PyTorch does, and against its manifest if it has one.

    Raises:
        DamagedCheckpoint: it does not fit its manifest.
        CheckpointException: PyTorch cannot read it.
    """
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    if (checkpoint / MANIFEST_FILE).exists():
        manifest = read_manifest(checkpoint)
        check_sizes(checkpoint, manifest)
        check_hashes(checkpoint, manifest, manifest.files)
    entries = dcp.FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype) if isinstance(entry, TensorStorageMetadata) else ""
        for name, entry in entries.items()
    }
    dcp.load(state, checkpoint_id=checkpoint, no_dist=True)
