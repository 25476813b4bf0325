"""``mxtrain doctor --model``: what the model of a config takes, computed on the meta device, without its memory."""

import math
import re
from collections import Counter
from collections.abc import Iterator

import torch

from mxtrain.cli import quiet
from mxtrain.conversion.plan import Plan
from mxtrain.conversion.weights import WeightUse, find_weights, weight_uses
from mxtrain.errors import ConfigError
from mxtrain.settings.read import places

PROCESSES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
OPTIMIZER_STATES = 2
"""Tensors of a weight's shape and dtype that Adam and AdamW keep: the means of the gradient and of its square"""
GATHERED_GROUPS = 2
"""FSDP gathers the weights of a block while it computes with those of the block before"""


def report(arguments: list[str]) -> str:
    """Return the report on a model as text.

    Args:
        arguments: the config file, then flags as training takes them.

    Raises:
        ConfigError: for mistakes in the settings, and a model that cannot be converted.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ConfigError("--model: CONFIG is missing: give a TOML file, and any flags after it")
    config, *flags = arguments
    quiet.hide_library_warnings()
    # This machine may lack the mode of the training, which changes nothing here.
    words = [f"--job.config_file={config}", *flags, "--mxnorm.mode=auto"]
    with places(words):
        return _report(words)


def _report(words: list[str]) -> str:
    from mxtrain.titan.models.describe import build_on_meta, convert_on_meta
    from mxtrain.titan.parse import parse_job_config

    job_config = parse_job_config(words)
    model = build_on_meta(job_config)
    _check(model, job_config)
    parts = [
        _table(f"{job_config.model.name} {job_config.model.flavor}", parameters(model)),
        _memory(model, job_config),
    ]
    plans = convert_on_meta(job_config, model)
    uses = next((plan.weights for plan in plans.values() if plan is not None and plan.weights), None)
    parts.append(_multiplications(uses or weight_uses(find_weights(dict(model.named_modules())), {}, {})))
    parts += [_conversion(name, plan) for name, plan in plans.items()]
    return "\n\n".join(parts)


def _check(model: torch.nn.Module, job_config) -> None:
    """Raise ConfigError for a model with other parts than TorchTitan's language models, and for a split tied head."""
    missing = [name for name in ("tok_embeddings", "layers", "output") if getattr(model, name, None) is None]
    if missing:
        raise ConfigError(
            f"model.name = {job_config.model.name!r} has no {', '.join(missing)}: doctor --model takes models with "
            "tok_embeddings, layers and output, as TorchTitan's language models have them"
        )
    if model.output.weight is model.tok_embeddings.weight:
        for name in ("tensor_parallel_degree", "pipeline_parallel_degree"):
            if (degree := getattr(job_config.parallelism, name)) > 1:
                raise ConfigError(
                    f"parallelism.{name} = {degree} does not work with a head that has the embedding's weight: allowed "
                    "is 1"
                )


def parameters(model: torch.nn.Module) -> list[tuple[str, str]]:
    """Return (what, number of parameters) of a model of TorchTitan. A weight with two names counts once."""
    total = _count(model)
    outer = {id(p): p.numel() for part in (model.tok_embeddings, model.output) for p in part.parameters()}
    idle = sum(math.prod(w.shape) * (1 - w.share) for w in find_weights(dict(model.named_modules())).values())
    rows = [("parameters", f"{total:,}"), ("without embedding, head", f"{total - sum(outer.values()):,}")]
    return [*rows, ("used by one token", f"{round(total - idle):,}")] if idle else rows


def _count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def shard_bytes(model: torch.nn.Module, shards: int, dtype: torch.dtype) -> int:
    """Return the bytes of the weights that the first of ``shards`` processes holds with FSDP2.

    FSDP2 divides a weight's first dimension and rounds up. Stacked experts [E, in, out] may be divided otherwise, and
    are counted in equal parts.
    """
    elements = 0
    for parameter in model.parameters():
        first, *rest = parameter.shape
        if len(rest) < 2:
            elements += math.ceil(first / shards) * math.prod(rest)
        else:
            elements += math.ceil(parameter.numel() / shards)
    return elements * dtype.itemsize


def gathered_bytes(model: torch.nn.Module, dtype: torch.dtype, expert_parallel: int = 1) -> int:
    """Return the bytes of the largest groups of weights that FSDP2 gathers at a time: blocks, embedding, head."""
    is_tied = model.output.weight is model.tok_embeddings.weight  # then it is gathered once
    groups = [model.output, *model.layers.values(), *([] if is_tied else [model.tok_embeddings])]
    elements = sorted(
        (sum(p.numel() // (expert_parallel if p.ndim > 2 else 1) for p in group.parameters()) for group in groups),
        reverse=True,
    )
    return sum(elements[:GATHERED_GROUPS]) * dtype.itemsize


def _memory(model: torch.nn.Module, job_config) -> str:
    training = job_config.training
    dtype, compute = getattr(torch, training.dtype), getattr(torch, training.mixed_precision_param)
    lines = [
        f"memory per GPU in GiB: {training.dtype} weights, gradients and {job_config.optimizer.name} states, sharded",
        f"  {'GPUs':<16}{'weights':>10}{'gradients':>11}{'optimizer':>11}{'gathered':>10}{'sum':>10}",
    ]
    for name, shards in _layouts(job_config.parallelism):
        weights = shard_bytes(model, shards, dtype)
        gathered = gathered_bytes(model, compute, job_config.parallelism.expert_parallel_degree) if shards > 1 else 0
        columns = [weights, weights, OPTIMIZER_STATES * weights, gathered]
        texts = [f"{value / 2**30:,.2f}" for value in (*columns, sum(columns))]
        lines.append(f"  {name:<16}{texts[0]:>10}{texts[1]:>11}{texts[2]:>11}{texts[3]:>10}{texts[4]:>10}")
    lines.append(
        f"  gathered: the two largest groups of weights, in {training.mixed_precision_param}. Left out: activations, "
        "logits, gathered gradients,\n  copies by autocast on one GPU, and what the allocator reserves"
    )
    if training.enable_cpu_offload:
        lines.append("  training.enable_cpu_offload = true: all but the gathered weights is in the CPU's memory")
    return "\n".join(lines)


def _layouts(parallelism) -> Iterator[tuple[str, int]]:
    """Yield numbers of processes, in words, and among how many of them each weight is divided."""
    replicas, given = parallelism.data_parallel_replicate_degree, parallelism.data_parallel_shard_degree
    others = (
        parallelism.tensor_parallel_degree * parallelism.context_parallel_degree * parallelism.pipeline_parallel_degree
    )
    counts = PROCESSES if given == -1 else (replicas * given * others,)
    for count in counts:
        if count % (replicas * others) or (given == -1 and replicas > 1 and count == replicas):
            continue
        shards = count // replicas
        yield (f"{count}" if replicas == 1 else f"{count} ({replicas} x {shards})"), shards


def _multiplications(uses: dict[str, WeightUse]) -> str:
    total = sum(use.multiplications for use in uses.values())
    low = sum(use.multiplications * use.quantized for use in uses.values())
    rows = [(name, f"{round(n):,} ({n / total:.1%})") for name, n in (("low precision", low), ("high", total - low))]
    rows.append(("all", f"{round(total):,}; products without a weight, such as attention scores, are not counted"))
    return _table("multiplications by weights, per token of a forward pass", rows)


def _conversion(name: str, plan: Plan | None) -> str:
    if plan is None:
        return f"{name}\n  left out here: not a converter of mxtrain; what it changes is not in these numbers"
    return f"{name}: {plan.headline}\n{_grouped(plan.details)}"


def _grouped(details: str) -> str:
    """Join the lines of a conversion that differ in the number of the layer only."""
    counts = Counter(re.sub(r"\blayers\.\d+\b", "layers.*", line.strip()) for line in details.splitlines())
    width = max((len(str(count)) for count in counts.values()), default=0)
    return "\n".join(f"  {count:>{width}} x  {line}" for line, count in counts.items())


def _table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])
