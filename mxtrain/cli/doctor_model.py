"""``mxtrain doctor --model``: what the model of a config takes, computed on the meta device, without its memory."""

import math
import re
from collections import Counter
from collections.abc import Iterator

import torch
import torch.nn as nn

from mxtrain.analysis.tables import titled
from mxtrain.cli import console
from mxtrain.conversion.weights import find_weights, weight_uses
from mxtrain.errors import ConfigError
from mxtrain.settings.fields import raise_first
from mxtrain.settings.machine import layout_problems, pipeline_problems
from mxtrain.settings.mxnorm_section import schedule_in
from mxtrain.settings.read import places, read_settings

MOST_PROCESSES = 256
OPTIMIZER_STATES = 2
"""Tensors of a weight's shape and dtype that Adam and AdamW keep: the means of the gradient and of its square"""
GATHERED_GROUPS = 2
"""FSDP gathers the weights of a block while it computes with those of the block before"""


def report(arguments: list[str]) -> str:
    """Return the report on the model of a config file, which ``arguments`` name before the flags of training.

    Raises ConfigError for mistakes in the settings, a layout that does not fit the model, and a model that cannot be
    converted.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("--model: CONFIG is missing: give a TOML file, and any flags after it")
    config, *flags = arguments
    console.hide_library_warnings()
    # This machine may lack the mode of the training, which changes nothing here.
    words = [f"--job.config_file={config}", *flags, "--mxnorm.mode=auto"]
    with places(words):
        return "\n\n".join(_sections(words))


def _sections(words: list[str]) -> Iterator[str]:
    from mxtrain.titan.check_job import check_model_layout
    from mxtrain.titan.converters import convert_on_meta
    from mxtrain.titan.job_config import check_model
    from mxtrain.titan.releases import engine

    settings = read_settings(words)
    check_model(settings.values)
    job_config = settings.values
    raise_first(pipeline_problems(settings), settings)
    check_model_layout(settings)
    raise_first(layout_problems(settings, _layouts(job_config.parallelism)[0][1]), settings)  # the fewest processes
    model, name = engine().build_on_meta(job_config), job_config.model.name
    if missing := [part for part in ("tok_embeddings", "layers", "output") if part not in modules_of(model)]:
        raise ConfigError(
            f"model.name = {name!r} has no {', '.join(missing)}: doctor --model needs embedding, blocks and head"
        )
    yield titled(f"{name} {job_config.model.flavor}", parameters(model))
    yield memory_table(model, job_config)
    plans = convert_on_meta(job_config, model)
    uses = next((plan.weights for plan in plans.values() if plan is not None and plan.weights), None)
    uses = uses or weight_uses(find_weights(modules_of(model)), {}, {})
    total = sum(use.multiplications for use in uses.values())
    low = sum(use.multiplications * use.quantized for use in uses.values())
    rows = [(name, f"{round(n):,} ({n / total:.1%})") for name, n in (("low precision", low), ("high", total - low))]
    rows.append(("all", f"{round(total):,}; products without a weight, such as attention scores, are not counted"))
    yield titled("multiplications by weights, per token: the mean of fprop, dgrad and wgrad", rows)
    for name, plan in plans.items():
        if plan is None:
            yield f"{name}\n  left out here: not a converter of mxtrain; what it changes is not in these numbers"
        else:
            yield f"{name}: {plan.headline}\n{_grouped(plan.details)}"
    if entries := schedule_in(job_config):
        yield "\n".join(["precision schedule", *(f"  {entry} ({entry.name})" for entry in entries)])


def parameters(model: nn.Module) -> list[tuple[str, str]]:
    """Return (what, number of parameters) of a model of TorchTitan. A weight with two names counts once."""
    total = sum(p.numel() for p in model.parameters())
    modules = modules_of(model)
    outer = {p: p.numel() for name in ("tok_embeddings", "output") for p in modules[name].parameters()}
    idle = sum(math.prod(w.shape) * (1 - w.share) for w in find_weights(modules).values())
    rows = [("parameters", f"{total:,}"), ("without embedding, head", f"{total - sum(outer.values()):,}")]
    return [*rows, ("used by one token", f"{round(total - idle):,}")] if idle else rows


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    """The modules of a model by their names in settings and checkpoints."""
    from mxtrain.titan.releases import engine

    return {engine().saved_name(name): module for name, module in model.named_modules()}


def _grouped(details: str) -> str:
    """Join the lines of a conversion that differ in the number of the layer only."""
    counts = Counter(re.sub(r"\blayers\.\d+\b", "layers.*", line.strip()) for line in details.splitlines())
    width = max((len(str(count)) for count in counts.values()), default=0)
    return "\n".join(f"  {count:>{width}} x  {line}" for line, count in counts.items())


def memory_table(model: nn.Module, job_config) -> str:
    """Return a table of the memory per GPU, with a row for every number of processes that the degrees allow.

    In a pipeline it is that of the rank with most weights.
    """
    from mxtrain.titan.releases import engine

    training, parallelism = job_config.training, job_config.parallelism
    names = training.dtype, training.mixed_precision_param, training.mixed_precision_reduce
    dtype, compute, reduce = (getattr(torch, name) for name in names)
    tensor, has_stages = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree > 1
    rank = max(groups_of_ranks(model, parallelism), key=lambda groups: shard_bytes(nn.ModuleList(groups), 1, dtype))
    frees = not has_stages or parallelism.fsdp_reshard_after_forward == "always"
    gathered = gathered_bytes(rank, compute, parallelism, GATHERED_GROUPS if frees else len(rank))
    left_out = "gathered gradients, activations, logits, copies by autocast on one GPU"
    of_weights = "the two largest groups of weights" if frees else "all weights of the rank"
    notes = [f"gathered: {of_weights}, in {names[1]}"]
    if has_stages:  # PyTorch adds up the chunks' gradients before it divides them among processes
        gathered += gathered_bytes(rank, reduce, parallelism, len(rank))
        notes[0] += f", and all its gradients, in {names[2]}, divided after the last chunk"
        notes.append("the rank of the pipeline with most weights")
        left_out = "activations, logits"
    notes.append(f"left out: {left_out}, and what the allocator reserves")
    if tensor > 1:
        notes.append("matrices that tensor parallelism leaves whole (gates, DeepSeek's wkv_a, wq_a) count as split")
    if training.enable_cpu_offload:
        notes.append("training.enable_cpu_offload = true: all but the gathered weights is in the CPU's memory")
    rows = [("GPUs", "weights", "gradients", "optimizer", "gathered", "sum")]
    for name, count, shards in _layouts(parallelism):
        weights = shard_bytes(nn.ModuleList(rank) if has_stages else model, shards, dtype, tensor)
        has_fsdp = count > 1 or engine().FSDP_ON_ONE_PROCESS  # which copies a single shard, too
        columns = [weights, weights, OPTIMIZER_STATES * weights, gathered if has_fsdp else 0]
        rows.append((name, *(f"{value / 2**30:,.2f}" for value in (*columns, sum(columns)))))
    states = f"{training.dtype} weights, gradients and {job_config.optimizer.name} states"
    return "\n  ".join([titled(f"memory per GPU in GiB: {states}, sharded", rows, words=1), *notes])


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
            elements += math.ceil(first / (shards * tensor if rest else shards)) * math.prod(rest)
        else:
            elements += math.ceil(parameter.numel() / (shards * tensor))
    return elements * dtype.itemsize


def groups_of_ranks(model: nn.Module, parallelism) -> list[list[nn.Module]]:
    """Return the weights that FSDP2 gathers at a time, for each rank of the pipeline: blocks, embedding, head.

    The final norm, which is gathered with the head, is left out.
    """
    from mxtrain.titan.check_job import modules_of_stages

    ranks, modules = parallelism.pipeline_parallel_degree, modules_of(model)
    head, embedding = modules["output"], modules["tok_embeddings"]
    if ranks == 1:
        is_tied = head.weight is embedding.weight  # then it is gathered once
        return [[head, *model.layers.values(), *([] if is_tied else [embedding])]]
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


def _layouts(parallelism) -> list[tuple[str, int, int]]:
    """Return layouts: in words, the number of processes, and among how many of them FSDP2 divides each weight.

    Raises ConfigError if the degrees fit no number of processes.
    """
    replicas, given = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    tensor, pipeline = parallelism.tensor_parallel_degree, parallelism.pipeline_parallel_degree
    expert, expert_tensor = parallelism.expert_parallel_degree, parallelism.expert_tensor_parallel_degree
    others = replicas * tensor * pipeline * parallelism.context_parallel_degree
    doubled = [others * 2**doublings for doublings in range(MOST_PROCESSES.bit_length())]
    found = []
    for count in [given * others] if given != -1 else [count for count in doubled if count <= MOST_PROCESSES]:
        shards = count // (replicas * tensor * pipeline)
        if shards * tensor % (expert * expert_tensor) == 0:
            parts = [f"pipeline {pipeline}"] * (pipeline > 1) + [f"tensor {tensor}"] * (tensor > 1)
            parts += [f"{replicas}"] * (replicas > 1) + [f"{shards}"] * (replicas > 1 or tensor * pipeline > 1)
            found.append((f"{count} ({' x '.join(parts)})" if parts else f"{count}", count, shards))
    if not found:
        raise ConfigError(
            f"parallelism.expert_parallel_degree = {expert} times expert_tensor_parallel_degree = {expert_tensor} does "
            "not divide the product of the degrees shard, context and tensor on any number of processes up to "
            f"{MOST_PROCESSES}"
        )
    return found
