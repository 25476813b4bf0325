"""Every setting: mxtrain's, TorchTitan's, and that of a user's module.

TorchTitan's come from its own dataclasses, by the names that its release 0.2.2 gave them. Their source is read and not
imported: an import takes seconds, for PyTorch, and a mistake in a setting should show at once.

TorchTitan declares types, and checks few values: a wrong one ends in a traceback, or in a training that does nothing.
So types here are narrower where some values cannot work.
"""

import typing
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from importlib.metadata import version
from typing import Literal

from mxtrain.errors import ConfigError, closest
from mxtrain.settings.fields import Field, Known, classes_in, declarations, fields_of
from mxtrain.settings.releases import lacks, package_folder, release
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
    Literal["Adam", "AdamW", "Muon"]: "optimizer.name",
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
    rules = sorted((section, rule) for rule, names in RULES.items() for section in names.split())
    narrower = {name: kind for kind, names in NARROWER.items() for name in names.split()}
    names = {**vars(typing), "field": lambda default_factory: default_factory()}
    titan, found = release(), {name: (*declared, "") for name, declared in release().own.items()}
    for name, (kind, value, doc) in _sources().items():
        default = titan.defaults[name] if name in titan.defaults else eval(value, names)
        found[name] = eval(kind, names), default, doc
    for name, (of_type, default, doc) in found.items():
        kind = narrower.get(name)
        kind = of_type if kind is None else kind | None if default is None else kind
        rule = [rule for section, rule in rules if f"{name}.".startswith(f"{section}.")][-1]
        found[name] = Field(name, kind, default, rule, doc)
    return found


def _sources() -> dict[str, tuple[str, str, str]]:
    """Setting -> its type, default and docstring in the source of the installed TorchTitan."""
    titan, found = release(), {}
    for section, place in titan.classes.items():
        file, *classes = place.split()
        new = {f"{section}.{field}" for field in titan.new.get(section, "").split()}
        for name in classes:
            found |= {name: source for name, source in _fields_in(file, name, section) if name not in new}
    for name, place in titan.renamed.items():
        file, of_class, field = place.split()
        if source := dict(_fields_in(file, of_class)).get(field):
            found[name] = source
    return found


def require_all_fields() -> None:
    """Raise ConfigError for a TorchTitan, such as a preview, that does not declare settings of mxtrain's trainer."""
    needed = {name for names in NARROWER.values() for name in names.split()} | release().renamed.keys()
    if names := [name for name in sorted(needed - titan_fields().keys()) if not name.startswith(tuple(release().gone))]:
        raise lacks(", ".join(names))


def _fields_in(file: str, name: str, section: str = "") -> Iterator[tuple[str, tuple[str, str, str]]]:
    """The fields of a class in a file of TorchTitan, and of its sections, by full names, with their sources."""
    path = package_folder() / file
    classes = classes_in(path) if path.exists() else {}
    for field, *source in declarations(classes.get(name, [])):
        full = f"{section}.{field}".removeprefix(".")
        if source[0] in classes:
            yield from _fields_in(file, source[0], full)
        else:
            yield full, source


@cache
def known_fields(custom: type | None = None) -> Known:
    """Every setting by full name, also those of the user's job config, ``custom``."""
    known = titan_fields() | own_fields()
    others = fields_of(custom) if custom is not None else {}
    same = {name: replace(field, resume=known[name].resume) for name, field in others.items() if name in known}
    return Known(known | others | same)


def unknown(name: str, known: Mapping[str, Field], is_table: bool = False) -> ConfigError:
    """The error for a setting or a table that does not exist, with what to do instead, or the closest name."""
    for gone, instead in release().gone.items():
        if f"{name}.".startswith(f"{gone}."):
            return ConfigError(f"{name} is not a setting of TorchTitan {version('torchtitan')}: {instead}")
    if is_table:
        tables = {other if known[other].kind == "table" else other.rpartition(".")[0] for other in known}
        close = closest(name, tables)
        way_on = f"did you mean [{close}]?" if close else "tables of your own need job.custom_config_module"
        return ConfigError(f"{name} is not a table of settings; {way_on}")
    last = name.rpartition(".")[2]
    by_last = {other.rpartition(".")[2]: other for other in known}
    same_name_elsewhere = [other for other in known if other.rpartition(".")[2] == last]
    close = closest(name, same_name_elsewhere, cutoff=0) or closest(name, known) or by_last.get(closest(last, by_last))
    way_on = f"did you mean {close}?" if close else "'mxtrain train --help-all' lists all settings"
    return ConfigError(f"{name} is not a setting; {way_on}")
