"""TorchTitan's settings, with the values that make sense for them.

TorchTitan declares types, and checks few values: a wrong one ends in a traceback, or in a training that does nothing.
"""

import ast
import dataclasses
import json
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from mxtrain.settings.types import (
    Amount,
    LocalPath,
    NotNegative,
    NumberKept,
    OpOrPositive,
    Positive,
    PositiveNumber,
    PositiveOrMinusOne,
    Seed,
    Share,
    ShareBelowOne,
    StepOrMinusOne,
)

ALLOWED = {
    "job.dump_folder": LocalPath,
    "profiling.save_traces_folder": LocalPath,
    "profiling.save_memory_snapshot_folder": LocalPath,
    "profiling.profile_freq": Positive,
    "profiling.profiler_active": Positive,
    "profiling.profiler_warmup": NotNegative,
    "metrics.save_tb_folder": LocalPath,
    "metrics.log_freq": Positive,
    "optimizer.name": Literal["Adam", "AdamW"],
    "optimizer.lr": Amount,
    "optimizer.beta1": ShareBelowOne,
    "optimizer.beta2": ShareBelowOne,
    "optimizer.eps": Amount,
    "optimizer.weight_decay": Amount,
    "lr_scheduler.warmup_steps": NotNegative,
    "lr_scheduler.total_steps": Positive | None,
    "lr_scheduler.decay_ratio": Share | None,
    "lr_scheduler.min_lr_factor": Share,
    "training.local_batch_size": Positive,
    "training.global_batch_size": PositiveOrMinusOne,
    "training.seq_len": Positive,
    "training.max_norm": PositiveNumber,
    "training.steps": Positive,
    "training.gc_freq": Positive,
    "training.dataloader.num_workers": NotNegative,
    "training.dataloader.prefetch_factor": Positive | None,
    "parallelism.data_parallel_replicate_degree": Positive,
    "parallelism.data_parallel_shard_degree": PositiveOrMinusOne,
    "parallelism.tensor_parallel_degree": Positive,
    "parallelism.pipeline_parallel_degree": Positive,
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
    "checkpoint.keep_latest_k": NumberKept,
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
    "debug.seed": Seed | None,
}
"""Full name of a setting -> its type, where TorchTitan's own type allows values that cannot work"""


def job_config_source() -> Path:
    """The file in which TorchTitan declares its settings."""
    (package,) = find_spec("torchtitan").submodule_search_locations
    return Path(package, "config", "job_config.py")


def titan_job_config() -> type:
    """TorchTitan's class ``JobConfig``, from its source: importing it would import PyTorch, which takes seconds."""
    file = job_config_source()
    tree = ast.parse(file.read_text(encoding="utf-8"))
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {"__name__": "torchtitan.config.job_config", "json": json, "os": os, "Any": Any, "Literal": Literal}
    names |= {name: getattr(dataclasses, name) for name in ("asdict", "dataclass", "field")}
    exec(compile(tree, file, "exec"), names)
    return names["JobConfig"]
