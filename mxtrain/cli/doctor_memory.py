"""The memory that a model takes on each GPU, by the layout of processes, for ``mxtrain doctor --model``."""

import math
from collections.abc import Iterator

import torch
import torch.nn as nn

from mxtrain.errors import ConfigError

MOST_PROCESSES = 256
OPTIMIZER_STATES = 2
"""Tensors of a weight's shape and dtype that Adam and AdamW keep: the means of the gradient and of its square"""
GATHERED_GROUPS = 2
"""FSDP gathers the weights of a block while it computes with those of the block before"""


def memory_table(model: nn.Module, job_config) -> str:
    """Return a table of the memory per GPU, with a row for every number of processes that the degrees allow.

    In a pipeline it is that of the rank with most weights.
    """
    training, parallelism = job_config.training, job_config.parallelism
    dtype, compute, reduce = (
        getattr(torch, name)
        for name in (training.dtype, training.mixed_precision_param, training.mixed_precision_reduce)
    )
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    rank = max(groups_of_ranks(model, parallelism), key=lambda groups: shard_bytes(nn.ModuleList(groups), 1, dtype))
    held = model if pipeline == 1 else nn.ModuleList(rank)
    reshards = parallelism.fsdp_reshard_after_forward == "always"
    layouts = list(_layouts(parallelism))
    if not layouts:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {parallelism.expert_parallel_degree} times expert_tensor_parallel_"
            f"degree = {parallelism.expert_tensor_parallel_degree} does not divide the product of the degrees shard, "
            f"context and tensor on any number of processes up to {MOST_PROCESSES}"
        )
    width = max([16, *(len(name) + 2 for name, *_ in layouts)])
    lines = [
        f"memory per GPU in GiB: {training.dtype} weights, gradients and {job_config.optimizer.name} states, sharded",
        f"  {'GPUs':<{width}}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'gathered':>10}{'sum':>10}",
    ]
    for name, count, shards in layouts:
        weights = shard_bytes(held, shards, dtype, tensor)
        # FSDP2 copies a single shard, too.
        gathered = gathered_bytes(rank, compute, parallelism) if count > 1 else 0
        if pipeline > 1:
            # PyTorch adds up the chunks' gradients before it divides them among processes.
            weights_gathered = gathered if reshards else gathered_bytes(rank, compute, parallelism, len(rank))
            gathered = gathered_bytes(rank, reduce, parallelism, len(rank)) + weights_gathered
        columns = [weights, weights, OPTIMIZER_STATES * weights, gathered]
        texts = [f"{value / 2**30:,.2f}" for value in (*columns, sum(columns))]
        lines.append(f"  {name:<{width}}{texts[0]:>10}{texts[1]:>11}{texts[2]:>11}{texts[3]:>10}{texts[4]:>10}")
    of_weights = "the two largest groups of weights" if pipeline == 1 or reshards else "all weights of the rank"
    gathered = f"  gathered: {of_weights}, in {training.mixed_precision_param}"
    if pipeline == 1:
        lines.append(
            f"{gathered}. Left out: gathered gradients, activations, logits,\n"
            "  copies by autocast on one GPU, and what the allocator reserves"
        )
    else:
        lines.append(
            f"{gathered}, and all its gradients, in {training.mixed_precision_reduce}, divided after the last chunk.\n"
            "  It is the rank of the pipeline with most weights. Left out: activations, logits, and what the allocator "
            "reserves"
        )
    if tensor > 1:
        lines.append("  matrices that tensor parallelism leaves whole (gates, DeepSeek's wkv_a, wq_a) count as split")
    if job_config.optimizer.early_step_in_backward:
        lines.append("  optimizer.early_step_in_backward = true: gradients are used up one by one, not held together")
    if training.enable_cpu_offload:
        lines.append("  training.enable_cpu_offload = true: all but the gathered weights is in the CPU's memory")
    return "\n".join(lines)


def shard_bytes(module: nn.Module, shards: int, dtype: torch.dtype, tensor: int = 1) -> int:
    """Return the bytes of the weights that the first of ``shards`` processes holds with FSDP2.

    FSDP2 divides a weight's first dimension and rounds up. Tensor parallelism divides matrices by ``tensor`` before
    that; vectors are whole. Stacked experts (three dimensions) may be divided otherwise, and are counted in equal
    parts.
    """
    elements = 0
    for parameter in module.parameters():
        first, *rest = parameter.shape
        if len(rest) < 2:
            parts = shards * tensor if rest else shards
            elements += math.ceil(first / parts) * math.prod(rest)
        else:
            elements += math.ceil(parameter.numel() / (shards * tensor))
    return elements * dtype.itemsize


def groups_of_ranks(model: nn.Module, parallelism) -> list[list[nn.Module]]:
    """Return the weights that FSDP2 gathers at a time, for each rank of the pipeline: blocks, embedding, head.

    The final norm, which is gathered with the head, is left out.
    """
    from mxtrain.titan.check_layout import modules_of_stages

    ranks = parallelism.pipeline_parallel_degree
    if ranks == 1:
        is_tied = model.output.weight is model.tok_embeddings.weight  # then it is gathered once
        return [[model.output, *model.layers.values(), *([] if is_tied else [model.tok_embeddings])]]
    modules = dict(model.named_modules())
    groups: list[list[nn.Module]] = [[] for _ in range(ranks)]
    for number, names in enumerate(modules_of_stages(len(model.layers), parallelism)):
        groups[number % ranks] += [modules[name] for name in names if name != "norm"]
    return groups


def gathered_bytes(groups: list[nn.Module], dtype: torch.dtype, parallelism, count: int = GATHERED_GROUPS) -> int:
    """Return the bytes of the ``count`` largest groups of weights, as FSDP2 gathers them.

    Stacked experts (weights of three dimensions) are divided by ``expert_parallel_degree`` and then, by features, by
    ``expert_tensor_parallel_degree``; without expert parallelism, by features as all other weights are: by
    ``tensor_parallel_degree``. Vectors are whole.
    """
    tensor = parallelism.tensor_parallel_degree
    experts = parallelism.expert_parallel_degree * parallelism.expert_tensor_parallel_degree
    of_experts = experts if parallelism.expert_parallel_degree > 1 else tensor
    parts = (1, 1, tensor, of_experts)  # by the number of dimensions
    elements = sorted(
        (sum(math.ceil(p.numel() / parts[min(p.ndim, 3)]) for p in group.parameters()) for group in groups),
        reverse=True,
    )
    return sum(elements[:count]) * dtype.itemsize


def fewest_processes(parallelism) -> int | None:
    """Return the least number of processes that the degrees allow; None if they allow none."""
    return next((count for _, count, _ in _layouts(parallelism)), None)


def _layouts(parallelism) -> Iterator[tuple[str, int, int]]:
    """Yield layouts: in words, the number of processes, and among how many of them FSDP2 divides each weight."""
    replicas, given = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    others = tensor * pipeline * parallelism.context_parallel_degree
    counts = [replicas * given * others]
    if given == -1:
        counts = [replicas * others * 2**doublings for doublings in range(MOST_PROCESSES.bit_length())]
    for count in counts:
        if given == -1 and count > MOST_PROCESSES:
            continue
        shards = count // (replicas * tensor * pipeline)
        if shards * tensor % (parallelism.expert_parallel_degree * parallelism.expert_tensor_parallel_degree):
            continue
        parts = [f"{replicas}"] * (replicas > 1) + [f"{shards}"] * (replicas > 1 or tensor * pipeline > 1)
        parts = [f"pipeline {pipeline}"] * (pipeline > 1) + [f"tensor {tensor}"] * (tensor > 1) + parts
        yield f"{count} ({' x '.join(parts)})" if parts else f"{count}", count, shards
