"""Checks against the machine: its devices, and the layout of its processes, by degrees, sequences, batches and chunks.

They need no model: ``mxtrain.titan.job_config`` compares a layout with it. TorchTitan itself checks the number of
chunks of a pipeline.
"""

import math
import re
from collections.abc import Mapping
from importlib.metadata import version
from typing import NamedTuple

from packaging.version import Version

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.mxnorm_section import quantizing_among

BLOCK = 32
"""Largest number of elements along an axis that share a scale"""

ONE_STAGE = ("1F1B", "GPipe")
"""Schedules of a pipeline with one stage on each rank; the others have two, or more"""

NEED_A_GPU = "profiling.enable_profiling profiling.enable_memory_snapshot training.enable_cpu_offload training.gc_debug"


class Machine(NamedTuple):
    processes: int
    has_gpus: bool


def process_count(environment: Mapping[str, str], devices: int) -> int:
    """Return the number of workers: NGPU if it is set, else one per accelerator, or one on a CPU."""
    text = environment.get("NGPU") or str(max(devices, 1))
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ConfigError(f"NGPU = {text!r} is not a number of processes; allowed is 1, 2, ...")
    if 0 < devices < int(text):
        raise ConfigError(f"NGPU = {text} is more than the number of accelerators; allowed is 1 to {devices}")
    return int(text)


def check_machine(settings: Settings, machine: Machine) -> None:
    """Raise ConfigError for a layout that does not fit, and for settings that a CPU does not have."""
    raise_first(layout_problems(settings, machine.processes), settings)
    raise_first(pipeline_problems(settings), settings)
    if not machine.has_gpus:
        raise_first(_problems_of_a_cpu(settings), settings)


def _problems_of_a_cpu(settings: Settings) -> Problems:
    s = settings.values
    for name in NEED_A_GPU.split():
        if settings[name]:
            yield name, "needs a GPU, which this machine does not have; leave it unset"
    if s.checkpoint.async_mode == "async_with_pinned_mem":
        yield "checkpoint.async_mode", "needs a GPU, whose copies go through pinned memory; on a CPU, set it to 'async'"
    casts = quantizing_among(s.model.converters) and (s.mxnorm.recipe != "unquantized" or s.mxnorm.recipes)
    # On a CPU, Inductor of PyTorch 2.13 fails to split loops that it has fused from several casts. Without this fusion
    # (config.cpp.max_horizontal_fusion_size = 1), it takes minutes for casts to NVFP4.
    if s.compile.enable and "model" in s.compile.components and s.compile.backend == "inductor" and casts:
        yield (
            "compile.backend",
            "does not compile casts to MX formats on a CPU; set compile.enable = false or compile.backend = "
            "'aot_eager'",
        )
    compiles_loss = s.compile.enable and "loss" in s.compile.components and s.compile.backend == "inductor"
    splits_loss = s.parallelism.tensor_parallel_degree > 1 and not s.parallelism.disable_loss_parallel
    if compiles_loss and splits_loss and Version(version("torch")) < Version("2.14"):
        yield (
            "compile.components",
            "has 'loss', which PyTorch before 2.14 compiles wrongly on a CPU with tensor parallelism; set "
            "compile.components = ['model']",
        )


def degree(s: Settings, kind: str) -> int:
    return s[f"parallelism.{kind}_parallel_degree"]


def global_batch_size(s: Settings, processes: int) -> int:
    """Return the sequences per step in effect, over all processes and microbatches."""
    given = s["training.global_batch_size"]
    return s["training.local_batch_size"] * _readers(s, processes) if given == -1 else given


def shards_of(s: Settings, processes: int) -> int:
    """The number of shards that ``data_parallel_shard_degree`` stands for; 0 if the other degrees leave none."""
    given = s["parallelism.data_parallel_shard_degree"]
    others = s["parallelism.data_parallel_replicate_degree"] * _other_degrees(s)
    return processes // others if given == -1 else given


def _other_degrees(s: Settings) -> int:
    return degree(s, "tensor") * degree(s, "pipeline") * degree(s, "context")


def _readers(s: Settings, processes: int) -> int:
    """The number of processes that read different text."""
    return s["parallelism.data_parallel_replicate_degree"] * shards_of(s, processes)


def layout_problems(s: Settings, processes: int) -> Problems:
    """What is wrong with the degrees of parallelism, and with sequences that they cut."""
    tensor, context, expert, expert_tensor = (degree(s, k) for k in ("tensor", "context", "expert", "expert_tensor"))
    quantizing = quantizing_among(s["model.converters"])
    replicas = s["parallelism.data_parallel_replicate_degree"]
    # TorchTitan checks this, too; but the number of processes that read text follows from it.
    if _readers(s, processes) * _other_degrees(s) != processes:
        given = s["parallelism.data_parallel_shard_degree"]  # -1 takes what the others leave
        kinds = ("tensor_parallel", "pipeline_parallel", "context_parallel", "data_parallel_replicate")
        culprit = max(kinds, key=lambda kind: s[f"parallelism.{kind}_degree"]) if given == -1 else "data_parallel_shard"
        yield (
            f"parallelism.{culprit}_degree",
            f"does not fit {processes} process(es): the product of shard {given}, replicate {replicas}, tensor "
            f"{tensor}, pipeline {degree(s, 'pipeline')} and context {context} must be {processes}; change one or NGPU",
        )
    if s["parallelism.enable_async_tensor_parallel"] and quantizing:
        finds = f"has no products to overlap with converter {quantizing[0]!r}; set it to false"
        yield "parallelism.enable_async_tensor_parallel", finds
    for name, number in (("mxnorm.gather", tensor), ("mxnorm.dispatch", expert)):
        if number > 1 and quantizing == ["mx_linear"] and s[name] == "quantized":
            yield name, "needs converter 'mxnorm', not 'mx_linear', whose norms send no codes; set it to 'auto'"
    ranks = shards_of(s, processes) * context * tensor
    if expert > 1 and ranks % (expert * expert_tensor):
        yield (
            "parallelism.expert_parallel_degree",
            f"times expert_tensor_parallel_degree = {expert_tensor} must divide {ranks}, the product of the degrees "
            "shard, context and tensor",
        )
    for name, is_read in (("training", True), ("validation", s["validation.enable"])):
        # The operands of wgrad, which validation does not have, have one scale for a block of tokens.
        blocks = bool(quantizing) and context > 1 and name == "training"
        # Context parallelism gives every rank two chunks. Tensor parallelism gathers them before they are cast.
        divisor = 2 * context * (math.lcm(tensor, BLOCK) if blocks else tensor) if context * tensor > 1 else 1
        length, parts = s[f"{name}.seq_len"], context * tensor
        if is_read and quantizing and tensor > 1 and s["mxnorm.gather"] == "quantized" and length % (parts * BLOCK):
            yield (
                "mxnorm.gather",
                f"needs whole blocks of {BLOCK} tokens on each of {parts} processes, tensor_parallel_degree times "
                f"context_parallel_degree, and {name}.seq_len = {length} is not a multiple of {parts * BLOCK}; set "
                "it to 'auto'",
            )
        if is_read and length % divisor:
            yield (
                f"{name}.seq_len",
                f"is not a multiple of {divisor}, which parallelism.context_parallel_degree = {context} and "
                f"tensor_parallel_degree = {tensor} need{f' with blocks of {BLOCK} tokens' if blocks else ''}",
            )
    if s["training.seq_len"] % 2:
        yield "training.seq_len", "is odd, and TorchTitan's models need an even number"
    batch, local, readers = s["training.global_batch_size"], s["training.local_batch_size"], _readers(s, processes)
    if batch != -1 and batch % (local * readers):
        yield (
            "training.global_batch_size",
            f"is not a multiple of training.local_batch_size = {local} times {readers} data-parallel process(es)",
        )


def pipeline_problems(s: Settings) -> Problems:
    """What is wrong with the batches of a pipeline that neither TorchTitan nor PyTorch sees before a validation."""
    batch, chunk = s["training.local_batch_size"], s["parallelism.pipeline_parallel_microbatch_size"]
    if degree(s, "pipeline") > 1 and s["validation.enable"] and chunk <= batch:
        if s["validation.local_batch_size"] % (batch // chunk):
            yield (
                "validation.local_batch_size",
                f"is not a multiple of the chunks of a batch in training: training.local_batch_size = {batch} over "
                f"parallelism.pipeline_parallel_microbatch_size = {chunk} makes {batch // chunk}",
            )


def parts_problem(s: Settings, layers: int) -> str | None:
    """What is wrong with the stages that the user names for a model of so many layers; TorchTitan drops layers."""
    parts = s["parallelism.module_fqns_per_model_part"]
    whole = ["tok_embeddings", *(f"layers.{number}" for number in range(layers)), "norm", "output"]
    if parts is None:
        return None
    if [name for part in parts for name in part] != whole:
        return f"needs tok_embeddings, layers.0 to layers.{layers - 1}, norm and output, once each and in this order"
    if "norm" not in parts[-1] or not all(parts):
        return "needs norm and output in the same stage, and a module in every stage"
    schedule, ranks = s["parallelism.pipeline_parallel_schedule"], degree(s, "pipeline")
    has_one = schedule in ONE_STAGE
    if len(parts) != ranks if has_one else len(parts) % ranks or len(parts) == ranks:
        needed = ranks if has_one else f"a multiple of {ranks}, and {2 * ranks} or more"
        return f"has {len(parts)} stages, and schedule {schedule} needs {needed}"
    return None
