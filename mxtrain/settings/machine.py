"""Mistakes that take the machine to see: its processes, devices, modules and files."""

import glob
import os
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

from mxtrain.data.tokenizer import require_tokenizer
from mxtrain.settings.layout import RELATIONS as LAYOUT_RELATIONS
from mxtrain.settings.pipeline import RELATIONS as PIPELINE_RELATIONS
from mxtrain.settings.registry import TITAN_QUANTIZING
from mxtrain.settings.relations import Relation, check, quantizing
from mxtrain.settings.values import Settings


class Machine(NamedTuple):
    """What a job runs on."""

    processes: int
    has_gpus: bool


def _missing_text(given: str | None) -> str | None:
    """What is wrong with ``training.dataset_path``; None if it matches a file."""
    path = os.path.expanduser(given or "")
    if os.path.exists(path) or next(glob.iglob(path, recursive=True), None) is not None:
        return None
    where = f" in the current folder, {os.getcwd()}" if path and not os.path.isabs(path) else ""
    return (
        f"matches no file{where}; training.dataset = 'files' needs a file, a folder or a glob such as "
        "'text/**/*.jsonl', or in data.prepared the name of a prepared text, which a run has in its data.json"
    )


def _is_missing(module: str) -> bool:
    try:
        return bool(module) and find_spec(module) is None
    except (ImportError, ValueError):
        return True


RELATIONS = (
    Relation(
        "experimental.custom_import",
        lambda s, machine: (
            _is_missing(s["experimental.custom_import"])
            and "is not a module that Python finds: mxtrain's is 'mxtrain.titan'; your own lies beside the config, in "
            "the current folder or on PYTHONPATH"
        ),
    ),
    Relation(
        "training.dataset_path",
        lambda s, machine: (
            s["training.dataset"] == "files"
            and not s["data.prepared"]  # its source is not read
            and _missing_text(s["training.dataset_path"])
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
    # On a CPU, Inductor of PyTorch 2.13 fails to split loops that it has fused from several casts. Without this fusion
    # (config.cpp.max_horizontal_fusion_size = 1), it takes minutes for casts to NVFP4.
    Relation(
        "compile.backend",
        lambda s, machine: (
            s["compile.enable"]
            and "model" in s["compile.components"]
            and s["compile.backend"] == "inductor"
            and not machine.has_gpus
            and quantizing(s)
            and (s["mxnorm.recipe"] != "unquantized" or s["mxnorm.recipes"])
            and "does not compile casts to MX formats on a CPU: set compile.enable = false or compile.backend = "
            "'aot_eager'"
        ),
    ),
    *(
        Relation(
            setting,
            lambda s, machine, setting=setting: (
                s[setting] and not machine.has_gpus and "needs a GPU; this machine has none"
            ),
        )
        for setting in (
            "profiling.enable_profiling",
            "profiling.enable_memory_snapshot",
            "training.enable_cpu_offload",
            "training.gc_debug",
        )
    ),
    *(
        Relation(
            "model.converters",
            lambda s, machine, name=name, emulate=emulate: (
                name in s["model.converters"]
                and not machine.has_gpus
                and not (emulate and s[emulate])
                and f"has {name!r}, which needs a GPU; this machine has none"
            ),
        )
        for name, emulate in {
            f"{TITAN_QUANTIZING}linear.float8": f"{TITAN_QUANTIZING}linear.float8.emulate",
            f"{TITAN_QUANTIZING}linear.mx": "",
            f"{TITAN_QUANTIZING}grouped_mm.float8": "",
            f"{TITAN_QUANTIZING}grouped_mm.mx": "",
        }.items()
    ),
)


def check_machine(settings: Settings, machine: Machine) -> None:
    """Raise ConfigError for files that do not exist, and for a layout that does not fit."""
    check((*LAYOUT_RELATIONS, *PIPELINE_RELATIONS, *RELATIONS), settings, machine)
    if folder := settings["model.hf_assets_path"]:
        require_tokenizer(Path(os.path.expanduser(folder)))
