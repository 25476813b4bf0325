"""Mistakes that take the machine to see: its processes, devices, modules and files."""

import glob
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mxtrain.data.tokenizer import require_tokenizer
from mxtrain.settings.relations import Relation, check
from mxtrain.settings.values import Settings


class Machine(NamedTuple):
    """What a job runs on."""

    processes: int
    has_gpus: bool


def _matches_no_file(path: str | None) -> bool:
    path = os.path.expanduser(path or "")
    return not os.path.exists(path) and next(glob.iglob(path, recursive=True), None) is None


def _is_missing(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is None
    except (ImportError, ValueError):
        return True


def _degree(s: Settings, kind: str) -> int:
    return s[f"parallelism.{kind}_parallel_degree"]


def _shards(s: Settings, processes: int) -> int:
    """The number of shards that ``data_parallel_shard_degree`` stands for; 0 if the other degrees leave none."""
    given = s["parallelism.data_parallel_shard_degree"]
    others = s["parallelism.data_parallel_replicate_degree"] * _other_degrees(s)
    return processes // others if given == -1 else given


def _other_degrees(s: Settings) -> int:
    return _degree(s, "tensor") * _degree(s, "pipeline") * _degree(s, "context")


def _readers(s: Settings, processes: int) -> int:
    """The number of processes that read different text."""
    return s["parallelism.data_parallel_replicate_degree"] * _shards(s, processes)


def global_batch_size(s: Settings, processes: int) -> int:
    """Return the sequences per step in effect, over all processes and microbatches."""
    given = s["training.global_batch_size"]
    return s["training.local_batch_size"] * _readers(s, processes) if given == -1 else given


RELATIONS = (
    Relation(
        "experimental.custom_import",
        lambda s, machine: (
            _is_missing(s["experimental.custom_import"])
            and "is not a module that Python finds; mxtrain's is 'mxtrain.titan'"
        ),
    ),
    Relation(
        "training.dataset_path",
        lambda s, machine: (
            s["training.dataset"] == "files"
            and not s["data.prepared"]  # its source is not read
            and _matches_no_file(s["training.dataset_path"])
            and "matches no file; training.dataset = 'files' needs a file, a folder or a glob such as 'text/**/*.jsonl'"
        ),
    ),
    Relation(
        "fault_tolerance.enable",
        lambda s, machine: s["fault_tolerance.enable"] and _is_missing("torchft") and "needs the package torchft",
    ),
    Relation(
        "checkpoint.async_mode",
        lambda s, machine: (
            s["checkpoint.async_mode"] == "async_with_pinned_mem"
            and not machine.has_gpus
            and "needs a GPU, whose copies go through pinned memory; on a CPU use 'async'"
        ),
    ),
    Relation(
        "parallelism.data_parallel_shard_degree",
        lambda s, machine: (
            _readers(s, machine.processes) * _other_degrees(s) != machine.processes
            and f"does not fit {machine.processes} process(es), which the product of all degrees must be; the others "
            f"are replicate {s['parallelism.data_parallel_replicate_degree']}, tensor {_degree(s, 'tensor')}, "
            f"pipeline {_degree(s, 'pipeline')} and context {_degree(s, 'context')}"
        ),
    ),
    # TorchTitan 0.2.2 divides the loss by the number of tokens on all ranks, so gradients must be summed. DDP averages
    # them: with two replicas the gradient norm is half of the correct value.
    Relation(
        "parallelism.data_parallel_replicate_degree",
        lambda s, machine: (
            s["parallelism.data_parallel_replicate_degree"] > 1
            and _shards(s, machine.processes) * _degree(s, "context") == 1
            and "without sharding is DDP, which averages gradients, but TorchTitan 0.2.2 needs their sum; use FSDP: "
            "data_parallel_shard_degree = -1, alone or (HSDP) greater than 1 beside the replicate degree"
        ),
    ),
    # On a CPU, PyTorch 2.13 misplaces the state of the random numbers among the results of such a graph.
    Relation(
        "compile.enable",
        lambda s, machine: (
            s["compile.enable"]
            and _degree(s, "tensor") > 1
            and s["activation_checkpoint.mode"] != "none"
            and not machine.has_gpus
            and f"with parallelism.tensor_parallel_degree = {_degree(s, 'tensor')} and activation_checkpoint.mode = "
            f"{s['activation_checkpoint.mode']!r} needs a GPU; on a CPU, PyTorch 2.13 compiles no such layers: set "
            "activation_checkpoint.mode = 'none'"
        ),
    ),
    # With two stages TorchTitan 0.2.2 does not divide by the number of tokens, and the gradient norm is about a
    # thousand times too large.
    Relation(
        "parallelism.pipeline_parallel_degree",
        lambda s, machine: (
            _degree(s, "pipeline") > 1
            and "gives wrong gradients in TorchTitan 0.2.2 (it does not divide by the number of tokens): allowed is 1"
        ),
    ),
    Relation(
        "training.global_batch_size",
        lambda s, machine: (
            s["training.global_batch_size"] != -1
            and s["training.global_batch_size"] % (s["training.local_batch_size"] * _readers(s, machine.processes))
            and f"is not a multiple of training.local_batch_size = {s['training.local_batch_size']} times "
            f"{_readers(s, machine.processes)} data-parallel process(es)"
        ),
    ),
    *(
        Relation(
            f"profiling.{setting}",
            lambda s, machine, setting=setting: (
                s[f"profiling.{setting}"] and not machine.has_gpus and "needs a GPU; this machine has none"
            ),
        )
        for setting in ("enable_profiling", "enable_memory_snapshot")
    ),
)


def check_machine(settings: Settings, machine: Machine) -> None:
    """Raise ConfigError for files that do not exist, and for a layout that does not fit or has wrong gradients."""
    check(RELATIONS, settings, machine)
    if folder := settings["model.hf_assets_path"]:
        require_tokenizer(Path(folder).expanduser())
