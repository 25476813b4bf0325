"""Every setting: mxtrain's, TorchTitan's, and that of a user's module.

TorchTitan's come from its own dataclasses, by the names that its release 0.2.2 gave them. It declares types, and checks
few values: a wrong one ends in a traceback, or in a training that does nothing. So types here are narrower where some
values cannot work.
"""

from collections.abc import Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache, reduce
from importlib import import_module
from importlib.metadata import version
from typing import Literal

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Field, Settings, fields_of
from mxtrain.settings.removed import SETTINGS
from mxtrain.settings.sections import JobConfig
from mxtrain.settings.types import (
    Amount,
    LocalPath,
    NotNegative,
    OpOrPositive,
    Positive,
    PositiveNumber,
    PositiveOrMinusOne,
    Resume,
    Seed,
    Share,
    ShareBelowOne,
    StepOrMinusOne,
)

RULES = {
    Resume.FREE: "job profiling comm memory_estimation compile activation_checkpoint validation checkpoint metrics "
    "parallelism training.dataloader training.local_batch_size training.enable_cpu_offload training.gc_freq "
    "training.gc_debug model.tokenizer_path model.print_after_conversion debug.deterministic "
    "debug.deterministic_warn_only",
    Resume.APPLIED: "lr_scheduler optimizer experimental fault_tolerance training.max_norm training.steps",
    Resume.DATA: "training.dataset training.dataset_path",
    Resume.REFUSED: "model training quantize debug optimizer.name optimizer.early_step_in_backward",
}
"""What a resumed run may do with settings of TorchTitan, and tables of them; the longest name counts"""

CHECKPOINT_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")

NARROWER = {
    Positive: "profiling.profile_freq profiling.profiler_active metrics.log_freq lr_scheduler.total_steps "
    "training.local_batch_size training.seq_len training.steps training.gc_freq training.dataloader.prefetch_factor "
    "parallelism.data_parallel_replicate_degree parallelism.tensor_parallel_degree "
    "parallelism.pipeline_parallel_degree parallelism.pipeline_parallel_layers_per_stage "
    "parallelism.pipeline_parallel_microbatch_size parallelism.context_parallel_degree "
    "parallelism.expert_parallel_degree parallelism.expert_tensor_parallel_degree checkpoint.interval "
    "comm.init_timeout_seconds comm.train_timeout_seconds validation.local_batch_size validation.seq_len "
    "validation.freq validation.dataloader.prefetch_factor",
    NotNegative: "profiling.profiler_warmup lr_scheduler.warmup_steps training.dataloader.num_workers "
    "parallelism.pipeline_parallel_first_stage_less_layers parallelism.pipeline_parallel_last_stage_less_layers "
    "checkpoint.keep_latest_k comm.trace_buf_size validation.dataloader.num_workers",
    PositiveOrMinusOne: "training.global_batch_size parallelism.data_parallel_shard_degree validation.steps",
    StepOrMinusOne: "checkpoint.load_step",
    Seed: "debug.seed",
    Amount: "optimizer.lr optimizer.eps optimizer.weight_decay",
    PositiveNumber: "training.max_norm",
    ShareBelowOne: "optimizer.beta1 optimizer.beta2",
    Share: "lr_scheduler.decay_ratio lr_scheduler.min_lr_factor activation_checkpoint.memory_budget",
    LocalPath: "job.dump_folder profiling.save_traces_folder profiling.save_memory_snapshot_folder "
    "metrics.save_tb_folder checkpoint.folder checkpoint.initial_load_path comm.save_traces_folder",
    OpOrPositive: "activation_checkpoint.selective_ac_option",
    Literal["default", "none"]: "activation_checkpoint.determinism_check",
    Literal["Adam", "AdamW"]: "optimizer.name",
    Literal["for-loop", "foreach", "fused"]: "optimizer.implementation",
    list[Literal["model", "loss"]]: "compile.components",
    list[Literal[CHECKPOINT_PARTS]]: "checkpoint.exclude_from_loading",
    # The other schedules compute the gradients of inputs and of weights apart. The backward of a layer computes both
    # each time it runs, so half of its work would be in vain.
    Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"]: "parallelism.pipeline_parallel_schedule",
    Literal[""]: "parallelism.pipeline_parallel_schedule_csv",
    Literal["headtail", "ptrr"]: "parallelism.context_parallel_load_balancer",
    Literal["standard"]: "parallelism.expert_parallel_comm_backend",  # not "deepep": other modules
    Literal["default"]: "comm.mode",  # the others simulate many processes on one, for tests
    # TorchTitan takes one name without a list, too, which a flag could not tell from a list.
    list[str]: "quantize.grouped_mm.float8.fqns quantize.grouped_mm.mx.fqns",
}
"""Types -> settings of TorchTitan that have them. A setting that is unset by default may also be None."""


@cache
def own_fields() -> dict[str, Field]:
    """The settings that mxtrain declares, by full name."""
    return fields_of(JobConfig)


@cache
def titan_fields() -> dict[str, Field]:
    """TorchTitan's settings by full name."""
    found = fields_of(_engine().JobConfig)
    rules = sorted((section, rule) for rule, names in RULES.items() for section in names.split())
    narrower = {name: kind for kind, names in NARROWER.items() for name in names.split()}
    for name, field in found.items():
        rule = [rule for section, rule in rules if f"{name}.".startswith(f"{section}.")][-1]
        kind = narrower.get(name)
        kind = field.type if kind is None else kind | None if field.default is None else kind
        found[name] = replace(field, type=kind, resume=rule)
    return found


def known_fields(custom: type | None = None) -> dict[str, Field]:
    """Every setting by full name.

    Args:
        custom: a job config with other settings, such as the user's.
    """
    known = titan_fields() | own_fields()
    others = fields_of(custom) if custom is not None else {}
    same = {name: replace(field, resume=known[name].resume) for name, field in others.items() if name in known}
    return known | others | same


def settings_of(job_config) -> Settings:
    """The values of a job config that TorchTitan's own command has parsed."""
    kind = type(job_config)
    known = {name: field for name, field in known_fields(kind).items() if name in fields_of(kind)}
    return Settings(known, {name: reduce(getattr, name.split("."), job_config) for name in known})


def unknown(name: str, known: Mapping[str, Field]) -> ConfigError:
    """The error for a setting that does not exist, with what to do instead, or the closest one that does."""
    for table, why in (
        (SETTINGS, "no longer exists"),
        (_engine().GONE, f"is not a setting of TorchTitan {version('torchtitan')}"),
    ):
        for gone, instead in table.items():
            if f"{name}.".startswith(f"{gone}."):
                return ConfigError(f"{name} {why}: {instead}")
    last = name.rpartition(".")[2]
    by_last = {other.rpartition(".")[2]: other for other in known}
    same_name_elsewhere = [other for other in known if other.rpartition(".")[2] == last]
    close = same_name_elsewhere or get_close_matches(name, known, n=1)
    close = close or [by_last[other] for other in get_close_matches(last, by_last, n=1)]
    return ConfigError(f"{name} is not a setting{f'; the closest is {close[0]}' if close else ''}")


def _engine():
    """What depends on TorchTitan's release. Imported here, because it imports this package."""
    return import_module("mxtrain.titan.releases").engine()
