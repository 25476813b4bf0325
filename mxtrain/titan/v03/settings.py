"""The settings of TorchTitan 0.3 by the names of 0.2.2, which our TOML files have under every release."""

from copy import copy
from dataclasses import MISSING, asdict, field, fields, make_dataclass
from functools import partial, reduce
from typing import Any, Literal, get_type_hints

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import MemoryBudgetAC, SelectiveAC
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from mxtrain.errors import ConfigError

TABLES = {
    "profiling": Profiler.Config,
    "metrics": MetricsProcessor.Config,
    "lr_scheduler": LRSchedulersContainer.Config,
    "training": TrainingConfig,
    "training.dataloader": ParallelAwareDataloader.Config,
    "parallelism": ParallelismConfig,
    "checkpoint": CheckpointManager.Config,
    "compile": CompileConfig,
    "comm": CommConfig,
    "validation": Validator.Config,
    "validation.dataloader": ParallelAwareDataloader.Config,
    "debug": DebugConfig,
}
"""Tables of 0.2.2 whose settings are fields of these classes"""

NEW = {
    "profiling": "profiler_repeat profiler_skip_first profiler_skip_first_wait memory_snapshot_freq "
    "memory_snapshot_max_entries trace_post_processor",
    "training": "disable_cuda_graphs",
    "training.dataloader": "dataset dataset_path",
    "parallelism": "enable_fsdp_symm_mem enable_sequence_parallel spmd_backend context_parallel_ptrr_mask_key",
    "compile": "enable_async_tensor_parallel",
    "validation": "dataloader",
    "validation.dataloader": "dataset dataset_path",
    "debug": "spmd_typechecking detect_anomaly batch_invariant print_config save_config_file enable_structured_logging",
}
"""Fields of these classes that are no settings of 0.2.2, or have another name there"""

ELSEWHERE = {
    "job.dump_folder": (Trainer.Config, "dump_folder"),
    "job.print_config": (DebugConfig, "print_config"),
    "model.hf_assets_path": (Trainer.Config, "hf_assets_path"),
    "optimizer.implementation": (OptimizersContainer.Config, "implementation"),
    "parallelism.enable_async_tensor_parallel": (CompileConfig, "enable_async_tensor_parallel"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (
        SelectiveAC.Config,
        "force_recompute_mm_shapes_by_fqns",
    ),
    "activation_checkpoint.preserve_rng_state": (SelectiveAC.Config, "preserve_rng_state"),
    "activation_checkpoint.determinism_check": (SelectiveAC.Config, "determinism_check"),
    "activation_checkpoint.debug": (SelectiveAC.Config, "debug"),
    "activation_checkpoint.memory_budget": (MemoryBudgetAC.Config, "memory_budget"),
    "activation_checkpoint.visualize_memory_budget_pareto": (MemoryBudgetAC.Config, "visualize_memory_budget_pareto"),
}
"""Settings of 0.2.2 -> the field that they are in 0.3"""

OWN: dict[str, tuple[Any, Any]] = {
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
    # 0.3 has one value for these: see ``GONE``.
    "optimizer.early_step_in_backward": (bool, False),
    "parallelism.disable_loss_parallel": (bool, False),
    "parallelism.expert_parallel_comm_backend": (str, "standard"),
    "parallelism.expert_tensor_parallel_degree": (int, 1),
    "memory_estimation.enable": (bool, False),
}
"""Settings of 0.2.2 that mxtrain reads and 0.3 does not declare -> type and default"""

FOLDERS = {"profiling.save_traces_folder": "profile_traces", "profiling.save_memory_snapshot_folder": "memory_snapshot"}
"""Defaults of 0.2.2 that 0.3 has changed: a run's folder is the same under both"""

GONE = {
    "parallelism.expert_tensor_parallel_degree": "experts are split by parallelism.expert_parallel_degree alone",
    "parallelism.disable_loss_parallel": "the loss of tensor parallelism is always parallel",
    "parallelism.context_parallel_rotate_method": "keys and values are always gathered",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "schedules that overlap experts are not used",
    "optimizer.early_step_in_backward": "the optimizer steps after the backward",
    "activation_checkpoint.early_stop": "a layer is always computed again as a whole",
    "model.print_after_conversion": "conversion.txt in the run's folder says what was converted",
    "checkpoint.enable_ft_dataloader_checkpoints": "torchft has a trainer of its own, which mxtrain does not use",
    "job.save_config_file": "config.toml in the run's folder has all settings",
    "experimental.custom_args_module": "job.custom_config_module declares settings",
    "fault_tolerance": "torchft has a trainer of its own, which mxtrain does not use",
    "memory_estimation": "mxtrain doctor --model estimates memory",
    "quantize": "model.converters names mxtrain's converters",
}
"""Settings, and tables of settings, of 0.2.2 that 0.3 does not have -> what takes their place"""


class _Table:
    def to_dict(self) -> dict:
        return asdict(self)


def _settings() -> dict[str, tuple]:
    """Name in 0.2.2 -> type, default, and the class that declares it with its name there."""
    found = {name: (*declaration, None) for name, declaration in OWN.items()}
    for table, kind in TABLES.items():
        found |= {
            f"{table}.{f.name}": _declared(kind, f.name)
            for f in fields(kind)
            if f.name not in NEW.get(table, "").split()
        }
    found |= {name: _declared(*place) for name, place in ELSEWHERE.items()}
    return found | {name: (found[name][0], default, found[name][2]) for name, default in FOLDERS.items()}


def _declared(kind: type, name: str) -> tuple:
    (f,) = (f for f in fields(kind) if f.name == name)
    default = f.default_factory() if f.default is MISSING else f.default
    return get_type_hints(kind, include_extras=True)[name], default, (kind, name)


def _table(names: dict[str, tuple], kind: str) -> type:
    """A dataclass with a field for every name, and one for every table of names with dots."""
    tables, own = {}, []
    for name, (of_type, default, declared) in names.items():
        table, dot, rest = name.partition(".")
        if dot:
            tables.setdefault(table, {})[rest] = (of_type, default, declared)
        else:
            metadata = {"declared": declared} if declared else {}
            own.append((name, of_type, field(default_factory=partial(copy, default), metadata=metadata)))
    for table, nested in tables.items():
        section = _table(nested, table)
        own.append((table, section, field(default_factory=section)))
    return make_dataclass(kind, own, bases=(_Table,))


JobConfig = _table(_settings(), "JobConfig")
"""A job's settings as attributes, as in TorchTitan 0.2.2: job_config.training.steps"""


def refuse_gone(job_config) -> None:
    """Raise ConfigError for a setting of 0.2.2 that is set to what 0.3 does not have."""
    for name in GONE.keys() & OWN.keys():
        value = reduce(getattr, name.split("."), job_config)
        if value != OWN[name][1]:
            raise ConfigError(f"{name} = {value!r} is not a setting of TorchTitan 0.3: {GONE[name]}")
    option = job_config.activation_checkpoint.selective_ac_option
    if option not in ("op", OWN["activation_checkpoint.selective_ac_option"][1]):
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} is for layers, and TorchTitan 0.3 chooses "
            "operations in every layer: allowed is 'op'"
        )
