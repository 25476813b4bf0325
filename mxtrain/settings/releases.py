"""The releases of TorchTitan: their versions, and where each declares the settings, by the names of 0.2.2.

Our TOML files have the names of 0.2.2 under every release. A new release is a row of ``RELEASES``.
"""

from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from packaging.specifiers import SpecifierSet

from mxtrain.errors import ConfigError


@dataclass(frozen=True)
class Release:
    """What differs by TorchTitan's release.

    Attributes:
        versions: the versions of TorchTitan.
        classes: table of settings -> the dataclasses that declare it, "FILE CLASS CLASS"; "" is the whole job.
        new: table -> fields of these classes that are no settings of 0.2.2, or have another name there.
        renamed: setting -> the field that it is, "FILE CLASS FIELD".
        own: settings that mxtrain reads and the release does not declare -> type and default.
        defaults: defaults of 0.2.2 that the release has changed: a run's folder is the same under both.
        gone: settings, and tables of settings, that the release does not have -> what takes their place.
    """

    versions: str
    classes: dict[str, str]
    new: dict[str, str] = field(default_factory=dict)
    renamed: dict[str, str] = field(default_factory=dict)
    own: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    defaults: dict[str, Any] = field(default_factory=dict)
    gone: dict[str, str] = field(default_factory=dict)


_CONFIGS, _CHECKPOINTER, _AC = "config/configs.py", "components/checkpointer", "distributed/activation_checkpoint.py"
_DATALOADER = "components/dataloader.py ParallelAwareDataloader.Config"
_NO_TORCHFT = "torchft has a trainer of its own, which mxtrain does not use"

RELEASES = {
    "v02": Release(">=0.2.2,<0.3", {"": "config/job_config.py JobConfig"}),
    "v03": Release(
        ">=0.3,<0.4",
        classes={
            "profiling": "tools/profiler.py Profiler.Config",
            "metrics": "components/metrics.py MetricsProcessor.Config",
            "lr_scheduler": "components/optimizer/lr_scheduler.py LRSchedulersContainer.Config",
            "training": f"{_CONFIGS} TrainingConfig",
            "training.dataloader": _DATALOADER,
            "parallelism": f"{_CONFIGS} ParallelismConfig",
            "checkpoint": f"{_CHECKPOINTER}/base.py BaseCheckpointManager.Config",
            "compile": f"{_CONFIGS} CompileConfig",
            "comm": f"{_CONFIGS} CommConfig",
            "validation": "components/validate.py BaseValidator.Config Validator.Config",
            "validation.dataloader": _DATALOADER,
            "debug": f"{_CONFIGS} DebugConfig",
        },
        new={
            "profiling": "profiler_repeat profiler_skip_first profiler_skip_first_wait memory_snapshot_freq "
            "memory_snapshot_max_entries trace_post_processor",
            "training": "disable_cuda_graphs",
            "parallelism": "enable_fsdp_symm_mem enable_sequence_parallel spmd_backend context_parallel_ptrr_mask_key",
            "compile": "enable_async_tensor_parallel",
            "validation": "dataloader",
            "debug": "spmd_typechecking detect_anomaly batch_invariant print_config save_config_file "
            "enable_structured_logging",
        },
        renamed={
            "job.dump_folder": "trainer.py Trainer.Config dump_folder",
            "job.print_config": f"{_CONFIGS} DebugConfig print_config",
            "model.hf_assets_path": "trainer.py Trainer.Config hf_assets_path",
            "optimizer.implementation": "components/optimizer/optimizer.py OptimizersContainer.Config implementation",
            "parallelism.enable_async_tensor_parallel": f"{_CONFIGS} CompileConfig enable_async_tensor_parallel",
            "checkpoint.async_mode": f"{_CHECKPOINTER}/dcp.py CheckpointManager.Config async_mode",
            "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
                f"{_AC} SelectiveAC.Config force_recompute_mm_shapes_by_fqns"
            ),
            **{
                f"activation_checkpoint.{name}": f"{_AC} {kind}.Config {name}"
                for kind, names in (
                    ("ActivationCheckpointing", "preserve_rng_state determinism_check debug"),
                    ("MemoryBudgetAC", "memory_budget visualize_memory_budget_pareto"),
                )
                for name in names.split()
            },
        },
        own={
            "job.config_file": (str | None, None),
            "job.description": (str, "default job"),
            "job.custom_config_module": (str, ""),
            "model.name": (str, "llama3"),
            "model.flavor": (str, "debugmodel"),
            "model.tokenizer_path": (str | None, None),
            "model.converters": (list[str], []),
            "optimizer.name": (str, "AdamW"),
            "optimizer.lr": (float, 8e-4),
            "optimizer.beta1": (float, 0.9),
            "optimizer.beta2": (float, 0.95),
            "optimizer.eps": (float, 1e-8),
            "optimizer.weight_decay": (float, 0.1),
            "training.dataset": (str, "c4_test"),
            "training.dataset_path": (str | None, None),
            "activation_checkpoint.mode": (Literal["selective", "full", "memory_budget", "none"], "selective"),
            "activation_checkpoint.selective_ac_option": (str, "2"),
            "experimental.custom_import": (str, ""),
            "validation.dataset": (str, "c4_validation"),
            "validation.dataset_path": (str | None, None),
            "validation.local_batch_size": (int, 8),
            "validation.seq_len": (int, 2048),
            # 0.3 has one value for these: see ``gone``.
            "optimizer.early_step_in_backward": (bool, False),
            "parallelism.disable_loss_parallel": (bool, False),
            "parallelism.expert_parallel_comm_backend": (str, "standard"),
            "parallelism.expert_tensor_parallel_degree": (int, 1),
            "memory_estimation.enable": (bool, False),
        },
        defaults={
            "profiling.save_traces_folder": "profile_traces",
            "profiling.save_memory_snapshot_folder": "memory_snapshot",
        },
        gone={
            "parallelism.expert_tensor_parallel_degree": "experts are split by parallelism.expert_parallel_degree "
            "alone",
            "parallelism.disable_loss_parallel": "the loss of tensor parallelism is always parallel",
            "parallelism.context_parallel_rotate_method": "keys and values are always gathered",
            "parallelism.pipeline_parallel_expert_parallel_overlap": "schedules that overlap experts are not used",
            "optimizer.early_step_in_backward": "the optimizer steps after the backward",
            "activation_checkpoint.early_stop": "a layer is always computed again as a whole",
            "model.print_after_conversion": "conversion.txt in the run's folder says what was converted",
            "checkpoint.enable_ft_dataloader_checkpoints": _NO_TORCHFT,
            "job.save_config_file": "config.toml in the run's folder has all settings",
            "experimental.custom_args_module": "job.custom_config_module declares settings",
            "fault_tolerance": _NO_TORCHFT,
            "memory_estimation": "mxtrain doctor --model estimates memory",
            "quantize": "model.converters names mxtrain's converters",
        },
    ),
}
"""Name of a release, and of its folder in ``mxtrain/titan`` -> what it is"""


def release_of(found: str) -> str:
    """Return the release among RELEASES that a version of TorchTitan belongs to."""
    for name, release in RELEASES.items():
        if SpecifierSet(release.versions).contains(found, prereleases=True):
            return name
    raise ConfigError(f"torchtitan = {found!r} is not a version that mxtrain supports; install 0.2.2 or 0.3")


def lacks(names: str) -> ConfigError:
    """The error for a TorchTitan, such as a preview, without names that mxtrain needs."""
    return ConfigError(f"the TorchTitan in {package_folder()} lacks what mxtrain needs: {names}; install 0.2.2 or 0.3")


def package_folder() -> Path:
    (folder,) = find_spec("torchtitan").submodule_search_locations
    return Path(folder)


@cache
def release_name() -> str:
    """The name of the installed release. TorchTitan's main is treated as 0.3, although its version is 0.2.2."""
    name = release_of(version("torchtitan"))
    return name if name != "v02" or (package_folder() / "config/job_config.py").exists() else "v03"


def release() -> Release:
    return RELEASES[release_name()]
