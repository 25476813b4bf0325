"""Every setting: mxtrain's, and TorchTitan's with what mxtrain says about them.

TorchTitan declares types, and checks few values: a wrong one ends in a traceback, or in a training that does nothing.
"""

from dataclasses import replace
from functools import cache, reduce
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic_core import to_jsonable_python

from mxtrain.settings.fields import Field, Settings, fields_of, rules_in
from mxtrain.settings.sections import JobConfig
from mxtrain.settings.types import (
    Amount,
    Applied,
    Free,
    Label,
    LocalPath,
    NotNegative,
    OpOrPositive,
    Positive,
    PositiveNumber,
    PositiveOrMinusOne,
    Refused,
    Resume,
    Seed,
    Share,
    ShareBelowOne,
    StepOrMinusOne,
)

SECTIONS = {
    Resume.FREE: "job profiling comm memory_estimation compile activation_checkpoint validation checkpoint metrics "
    "parallelism training.dataloader",
    Resume.APPLIED: "lr_scheduler optimizer experimental fault_tolerance",
    Resume.REFUSED: "model training quantize debug",
}
"""What a resumed run may do with the settings of TorchTitan's sections, except for those below"""

TITAN = {
    "job.dump_folder": LocalPath,
    "profiling.save_traces_folder": LocalPath,
    "profiling.save_memory_snapshot_folder": LocalPath,
    "profiling.profile_freq": Positive,
    "profiling.profiler_active": Positive,
    "profiling.profiler_warmup": NotNegative,
    "metrics.save_tb_folder": LocalPath,
    "metrics.log_freq": Positive,
    "model.name": Annotated[Any, Label()],  # other models are compared apart
    "model.flavor": Annotated[Any, Label("model")],
    "model.tokenizer_path": Annotated[Any, Resume.FREE, Label(variant=True)],
    "model.print_after_conversion": Free[Any],
    "optimizer.name": Refused[Literal["Adam", "AdamW"]],
    "optimizer.lr": Annotated[Amount, Label("lr")],
    "optimizer.beta1": ShareBelowOne,
    "optimizer.beta2": ShareBelowOne,
    "optimizer.eps": Amount,
    "optimizer.weight_decay": Amount,
    "optimizer.early_step_in_backward": Refused[Any],
    "lr_scheduler.warmup_steps": NotNegative,
    "lr_scheduler.total_steps": Positive | None,
    "lr_scheduler.decay_ratio": Share | None,
    "lr_scheduler.min_lr_factor": Share,
    "training.dataset": Annotated[Any, Resume.DATA],
    "training.dataset_path": Annotated[Any, Resume.DATA],
    "training.local_batch_size": Annotated[Positive, Resume.FREE, Label(variant=True)],
    "training.global_batch_size": PositiveOrMinusOne,
    "training.seq_len": Positive,
    "training.max_norm": Applied[PositiveNumber],
    "training.steps": Annotated[Positive, Resume.APPLIED, Label()],
    "training.enable_cpu_offload": Free[Any],
    "training.gc_freq": Free[Positive],
    "training.gc_debug": Free[Any],
    "training.dataloader.num_workers": NotNegative,
    "training.dataloader.prefetch_factor": Positive | None,
    "parallelism.data_parallel_replicate_degree": Positive,
    "parallelism.data_parallel_shard_degree": PositiveOrMinusOne,
    "parallelism.tensor_parallel_degree": Positive,
    "parallelism.pipeline_parallel_degree": Positive,
    # The other schedules compute the gradients of inputs and of weights apart. The backward of a layer computes both
    # each time it runs, so half of its work would be in vain.
    "parallelism.pipeline_parallel_schedule": Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"],
    "parallelism.pipeline_parallel_schedule_csv": Literal[""],
    "parallelism.pipeline_parallel_microbatch_size": Positive,
    "parallelism.pipeline_parallel_layers_per_stage": Positive | None,
    "parallelism.pipeline_parallel_first_stage_less_layers": NotNegative,
    "parallelism.pipeline_parallel_last_stage_less_layers": NotNegative,
    "parallelism.context_parallel_degree": Positive,
    # TorchTitan's None, no balancing, has no place in a TOML file, so a run that resumes would forget it.
    "parallelism.context_parallel_load_balancer": Literal["headtail", "ptrr"],
    "parallelism.expert_parallel_degree": Positive,
    "parallelism.expert_tensor_parallel_degree": Positive,
    "parallelism.expert_parallel_comm_backend": Literal["standard"],  # experts of "deepep" are other modules
    "checkpoint.folder": LocalPath,
    "checkpoint.initial_load_path": LocalPath | None,
    "checkpoint.interval": Positive,
    "checkpoint.keep_latest_k": NotNegative,
    "checkpoint.load_step": StepOrMinusOne,
    "checkpoint.exclude_from_loading": list[Literal["model", "optimizer", "lr_scheduler", "dataloader", "train_state"]],
    "activation_checkpoint.selective_ac_option": OpOrPositive,
    "activation_checkpoint.memory_budget": Share,
    "activation_checkpoint.determinism_check": Literal["default", "none"],
    "compile.components": list[Literal["model", "loss"]],
    "comm.mode": Literal["default"],  # the others simulate many processes on one, for tests
    "comm.save_traces_folder": LocalPath,
    "comm.init_timeout_seconds": Positive,
    "comm.train_timeout_seconds": Positive,
    "comm.trace_buf_size": NotNegative,
    "validation.local_batch_size": Positive,
    "validation.seq_len": Positive,
    "validation.freq": Positive,
    "validation.steps": PositiveOrMinusOne,
    "validation.dataloader.num_workers": NotNegative,
    "validation.dataloader.prefetch_factor": Positive | None,
    # TorchTitan takes one name without a list, too, which a flag could not tell from a list.
    "quantize.grouped_mm.float8.fqns": list[str],
    "quantize.grouped_mm.mx.fqns": list[str],
    "debug.seed": Annotated[Seed | None, Label("seed")],
    "debug.deterministic": Free[Any],
    "debug.deterministic_warn_only": Free[Any],
}
"""
Full name of a setting -> its type, where TorchTitan's own (``Any``) allows values that cannot work, and its rules,
where they are not those of its section
"""


@cache
def own_fields() -> dict[str, Field]:
    """The settings that mxtrain declares, by full name. Does not import TorchTitan."""
    return fields_of(JobConfig, own=True)


def known_fields(custom: type | None = None) -> dict[str, Field]:
    """Every setting by full name. Imports TorchTitan and so PyTorch, which takes seconds.

    Args:
        custom: a job config with other settings, such as the user's.
    """
    from torchtitan.config import JobConfig as TitanJobConfig

    known = {name: _narrowed(field) for name, field in fields_of(TitanJobConfig).items()} | own_fields()
    others = fields_of(custom) if custom is not None else {}
    rules = {name: {"resume": known[name].resume, "label": known[name].label} for name in others if name in known}
    return known | {name: replace(field, **rules.get(name, {})) for name, field in others.items()}


def settings_of(job_config) -> Settings:
    """The values of a job config by the full names of its settings."""
    kind = type(job_config)
    known = {name: field for name, field in known_fields(kind).items() if name in fields_of(kind)}
    return Settings(known, {name: reduce(getattr, name.split("."), job_config) for name in known})


def resolved_settings(job_config) -> dict:
    """Return every setting that differs from its default, flags included, as nested tables for a TOML file.

    Without the names of the config file and of the run's folder: a run of these settings must not write into it. With
    ``mxnorm.diagnostics.every = 0`` beside other settings of diagnostics, which are refused without it.
    """
    settings = settings_of(job_config)
    left_out = ("job.config_file", "job.dump_folder")
    values = {
        name: to_jsonable_python(settings[name])  # paths, tuples and sets of a user's own section
        for name in settings.known
        if settings.changed(name) and settings[name] is not None and name not in left_out
    }
    if any(name.startswith("mxnorm.diagnostics.") for name in values):
        values.setdefault("mxnorm.diagnostics.every", 0)
    return Settings(settings.known, values).tables()


def rules_of(name: str) -> tuple[Resume | None, Label | None]:
    """What a resumed run and a plot do with a setting; None for one of the user's own. Does not import TorchTitan."""
    own = own_fields().get(name)
    return _titan_rules(name) if own is None else (own.resume, own.label)


def worded_settings() -> dict[str, str]:
    """Word in the legend of a plot -> full name of the setting that it stands for."""
    labels = {name: rules_of(name)[1] for name in (*TITAN, *own_fields())}
    return {label.word: name for name, label in labels.items() if label is not None and label.word}


def _titan_rules(name: str) -> tuple[Resume | None, Label | None]:
    sections = {section: resume for resume, names in SECTIONS.items() for section in names.split()}
    above = [section for section in sections if name.startswith(f"{section}.")]
    return rules_in(TITAN.get(name), sections[max(above, key=len)] if above else None, None)


def _narrowed(field: Field) -> Field:
    """A field of TorchTitan's with the type and the rules of ``TITAN``."""
    allowed = TITAN.get(field.name, Any)
    bare = get_args(allowed)[0] if get_origin(allowed) is Annotated else allowed
    return Field(field.name, field.type if bare is Any else allowed, field.default, *_titan_rules(field.name))
