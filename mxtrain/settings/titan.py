"""TorchTitan's settings: those of its release 0.2.2, whose names our TOML files have under every release.

TorchTitan declares types, and checks few values: a wrong one ends in a traceback, or in a training that does nothing.
So types here are narrower where some values cannot work.
"""

from functools import cache
from typing import Annotated, Literal

from mxtrain.settings.fields import Field, rules_in
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
"""What a resumed run may do with the settings of a section, except where the type says something else"""

CHECKPOINT_PARTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")

TITAN = {
    "job.config_file": (str | None, None),
    "job.dump_folder": (LocalPath, "./outputs"),
    "job.description": (str, "default job"),
    "job.print_config": (bool, False),
    "job.save_config_file": (str | None, None),
    "job.custom_config_module": (str, ""),
    "profiling.enable_profiling": (bool, False),
    "profiling.save_traces_folder": (LocalPath, "profile_traces"),
    "profiling.profile_freq": (Positive, 10),
    "profiling.profiler_active": (Positive, 1),
    "profiling.profiler_warmup": (NotNegative, 3),
    "profiling.enable_memory_snapshot": (bool, False),
    "profiling.save_memory_snapshot_folder": (LocalPath, "memory_snapshot"),
    "metrics.log_freq": (Positive, 10),
    "metrics.enable_tensorboard": (bool, False),
    "metrics.disable_color_printing": (bool, False),
    "metrics.save_tb_folder": (LocalPath, "tb"),
    "metrics.save_for_all_ranks": (bool, False),
    "metrics.enable_wandb": (bool, False),
    "model.name": (Annotated[str, Label()], "llama3"),  # other models are compared apart
    "model.flavor": (Annotated[str, Label("model")], "debugmodel"),
    "model.hf_assets_path": (str, "./tests/assets/tokenizer"),
    "model.tokenizer_path": (Annotated[str | None, Resume.FREE, Label(variant=True)], None),
    "model.converters": (list[str], []),
    "model.print_after_conversion": (Free[bool], False),
    "optimizer.name": (Refused[Literal["Adam", "AdamW"]], "AdamW"),
    "optimizer.lr": (Annotated[Amount, Label("lr")], 0.0008),
    "optimizer.beta1": (ShareBelowOne, 0.9),
    "optimizer.beta2": (ShareBelowOne, 0.95),
    "optimizer.eps": (Amount, 1e-08),
    "optimizer.weight_decay": (Amount, 0.1),
    "optimizer.implementation": (Literal["for-loop", "foreach", "fused"], "fused"),
    "optimizer.early_step_in_backward": (Refused[bool], False),
    "lr_scheduler.warmup_steps": (NotNegative, 200),
    "lr_scheduler.total_steps": (Positive | None, None),
    "lr_scheduler.decay_ratio": (Share | None, None),
    "lr_scheduler.decay_type": (Literal["linear", "sqrt", "cosine"], "linear"),
    "lr_scheduler.min_lr_factor": (Share, 0.0),
    "training.dataset": (Annotated[str, Resume.DATA], "c4_test"),
    "training.dataset_path": (Annotated[str | None, Resume.DATA], None),
    "training.local_batch_size": (Annotated[Positive, Resume.FREE, Label(variant=True)], 8),
    "training.global_batch_size": (PositiveOrMinusOne, -1),
    "training.seq_len": (Positive, 2048),
    "training.max_norm": (Applied[PositiveNumber], 1.0),
    "training.steps": (Annotated[Positive, Resume.APPLIED, Label()], 10000),
    "training.enable_cpu_offload": (Free[bool], False),
    "training.dtype": (Literal["bfloat16", "float32"], "float32"),
    "training.mixed_precision_param": (Literal["bfloat16", "float32"], "bfloat16"),
    "training.mixed_precision_reduce": (Literal["float32"], "float32"),
    "training.gc_freq": (Free[Positive], 50),
    "training.gc_debug": (Free[bool], False),
    "training.dataloader.num_workers": (NotNegative, 0),
    "training.dataloader.persistent_workers": (bool, False),
    "training.dataloader.pin_memory": (bool, False),
    "training.dataloader.prefetch_factor": (Positive | None, None),
    "parallelism.data_parallel_replicate_degree": (Positive, 1),
    "parallelism.data_parallel_shard_degree": (PositiveOrMinusOne, -1),
    "parallelism.fsdp_reshard_after_forward": (Literal["default", "always", "never"], "default"),
    "parallelism.tensor_parallel_degree": (Positive, 1),
    "parallelism.disable_loss_parallel": (bool, False),
    "parallelism.enable_async_tensor_parallel": (bool, False),
    "parallelism.pipeline_parallel_degree": (Positive, 1),
    "parallelism.module_fqns_per_model_part": (list[list[str]] | None, None),
    "parallelism.pipeline_parallel_first_stage_less_layers": (NotNegative, 1),
    "parallelism.pipeline_parallel_last_stage_less_layers": (NotNegative, 1),
    "parallelism.pipeline_parallel_layers_per_stage": (Positive | None, None),
    # The other schedules compute the gradients of inputs and of weights apart. The backward of a layer computes both
    # each time it runs, so half of its work would be in vain.
    "parallelism.pipeline_parallel_schedule": (Literal["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS"], "1F1B"),
    "parallelism.pipeline_parallel_schedule_csv": (Literal[""], ""),
    "parallelism.pipeline_parallel_microbatch_size": (Positive, 1),
    "parallelism.pipeline_parallel_expert_parallel_overlap": (bool, True),
    "parallelism.context_parallel_degree": (Positive, 1),
    # TorchTitan's None, no balancing, has no place in a TOML file, so a run that resumes would forget it.
    "parallelism.context_parallel_load_balancer": (Literal["headtail", "ptrr"], "headtail"),
    "parallelism.context_parallel_rotate_method": (Literal["allgather", "alltoall"], "allgather"),
    "parallelism.expert_parallel_degree": (Positive, 1),
    "parallelism.expert_tensor_parallel_degree": (Positive, 1),
    "parallelism.expert_parallel_comm_backend": (Literal["standard"], "standard"),  # not "deepep": other modules
    "checkpoint.enable": (bool, False),
    "checkpoint.enable_ft_dataloader_checkpoints": (bool, True),
    "checkpoint.folder": (LocalPath, "checkpoint"),
    "checkpoint.interval": (Positive, 500),
    "checkpoint.initial_load_path": (LocalPath | None, None),
    "checkpoint.initial_load_model_only": (bool, True),
    "checkpoint.initial_load_in_hf": (bool, False),
    "checkpoint.initial_load_in_hf_quantized": (bool, False),
    "checkpoint.last_save_model_only": (bool, True),
    "checkpoint.last_save_in_hf": (bool, False),
    "checkpoint.export_dtype": (Literal["float16", "bfloat16", "float32"], "float32"),
    "checkpoint.async_mode": (Literal["disabled", "async", "async_with_pinned_mem"], "disabled"),
    "checkpoint.keep_latest_k": (NotNegative, 10),
    "checkpoint.load_step": (StepOrMinusOne, -1),
    "checkpoint.exclude_from_loading": (list[Literal[CHECKPOINT_PARTS]], []),
    "checkpoint.enable_first_step_checkpoint": (bool, False),
    "checkpoint.create_seed_checkpoint": (bool, False),
    "checkpoint.load_only": (bool, False),
    "activation_checkpoint.mode": (Literal["selective", "full", "memory_budget", "none"], "selective"),
    "activation_checkpoint.selective_ac_option": (OpOrPositive, "2"),
    "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns": (list[str], ["moe.router.gate"]),
    "activation_checkpoint.early_stop": (bool, False),
    "activation_checkpoint.memory_budget": (Share, 0.5),
    "activation_checkpoint.visualize_memory_budget_pareto": (bool, False),
    "activation_checkpoint.preserve_rng_state": (bool, True),
    "activation_checkpoint.determinism_check": (Literal["default", "none"], "default"),
    "activation_checkpoint.debug": (bool, False),
    "compile.enable": (bool, False),
    "compile.components": (list[Literal["model", "loss"]], ["model", "loss"]),
    "compile.backend": (str, "inductor"),
    "quantize.linear.float8.enable_fsdp_float8_all_gather": (bool, False),
    "quantize.linear.float8.precompute_float8_dynamic_scale_for_fsdp": (bool, False),
    "quantize.linear.float8.recipe_name": (Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] | None, None),
    "quantize.linear.float8.filter_fqns": (list[str], []),
    "quantize.linear.float8.emulate": (bool, False),
    "quantize.linear.mx.mxfp8_dim1_cast_kernel_choice": (Literal["triton", "cuda", "torch"], "triton"),
    "quantize.linear.mx.recipe_name": (str, "mxfp8_cublas"),
    "quantize.linear.mx.filter_fqns": (list[str], ["output"]),
    # TorchTitan takes one name without a list, too, which a flag could not tell from a list.
    "quantize.grouped_mm.float8.fqns": (list[str], []),
    "quantize.grouped_mm.mx.recipe_name": (Literal["mxfp8"], "mxfp8"),
    "quantize.grouped_mm.mx.fqns": (list[str], []),
    "comm.init_timeout_seconds": (Positive, 300),
    "comm.train_timeout_seconds": (Positive, 100),
    "comm.trace_buf_size": (NotNegative, 20000),
    "comm.save_traces_folder": (LocalPath, "comm_traces"),
    "comm.save_traces_file_prefix": (str, "rank_"),
    "comm.mode": (Literal["default"], "default"),  # the others simulate many processes on one, for tests
    "memory_estimation.enable": (bool, False),
    "memory_estimation.disable_fake_mode": (bool, False),
    "fault_tolerance.enable": (bool, False),
    "fault_tolerance.process_group": (str, "gloo"),
    "fault_tolerance.process_group_timeout_ms": (int, 10000),
    "fault_tolerance.replica_id": (int, 0),
    "fault_tolerance.group_size": (int, 0),
    "fault_tolerance.min_replica_size": (int, 1),
    "fault_tolerance.semi_sync_method": (str | None, None),
    "experimental.custom_import": (str, ""),
    "experimental.custom_args_module": (str, ""),
    "validation.enable": (bool, False),
    "validation.dataset": (str, "c4_validation"),
    "validation.dataset_path": (str | None, None),
    "validation.local_batch_size": (Positive, 8),
    "validation.seq_len": (Positive, 2048),
    "validation.freq": (Positive, 10),
    "validation.steps": (PositiveOrMinusOne, -1),
    "validation.dataloader.num_workers": (NotNegative, 0),
    "validation.dataloader.persistent_workers": (bool, False),
    "validation.dataloader.pin_memory": (bool, False),
    "validation.dataloader.prefetch_factor": (Positive | None, None),
    "debug.seed": (Annotated[Seed | None, Label("seed")], None),
    "debug.deterministic": (Free[bool], False),
    "debug.deterministic_warn_only": (Free[bool], False),
    "debug.moe_force_load_balance": (bool, False),
}
"""Full name of a setting -> its type and its default"""


@cache
def titan_fields() -> dict[str, Field]:
    """TorchTitan's settings by full name."""
    sections = {section: resume for resume, names in SECTIONS.items() for section in names.split()}
    found = {}
    for name, (kind, default) in TITAN.items():
        above = max((section for section in sections if name.startswith(f"{section}.")), key=len)
        found[name] = Field(name, kind, default, *rules_in(kind, sections[above], None))
    return found
