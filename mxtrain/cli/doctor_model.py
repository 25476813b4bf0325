"""``mxtrain doctor --model``: what the model of a config takes, computed on the meta device, without its memory."""

import math
import re
from collections import Counter

import torch

from mxtrain.cli import quiet
from mxtrain.cli.doctor import table
from mxtrain.cli.doctor_memory import fewest_processes, memory_table
from mxtrain.conversion.plan import Plan
from mxtrain.conversion.weights import WeightUse, find_weights, weight_uses
from mxtrain.errors import ConfigError
from mxtrain.settings.fields import raise_first
from mxtrain.settings.layout import layout_problems, pipeline_problems
from mxtrain.settings.read import places


def report(arguments: list[str]) -> str:
    """Return the report on a model as text.

    Args:
        arguments: the config file, then flags as training takes them.

    Raises:
        ConfigError: for mistakes in the settings, a layout that does not fit the model, and a model that cannot be
            converted.
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
    from mxtrain.titan.check_layout import check_model_layout
    from mxtrain.titan.models.describe import build_on_meta, convert_on_meta
    from mxtrain.titan.parse import parse_job_config, settings_of
    from mxtrain.titan.schedule import guard_in, schedule_in
    from mxtrain.titan.trial_plan import try_plan

    job_config = parse_job_config(words)
    settings = settings_of(job_config)
    raise_first(pipeline_problems(settings), settings)
    check_model_layout(settings, has_gpus=True)
    if (processes := fewest_processes(job_config.parallelism)) is not None:
        raise_first(layout_problems(settings, processes), settings)
    model = build_on_meta(job_config)
    _check_parts(model, job_config)
    parts = [
        table(f"{job_config.model.name} {job_config.model.flavor}", parameters(model)),
        memory_table(model, job_config),
    ]
    plans = convert_on_meta(job_config, model)
    uses = next((plan.weights for plan in plans.values() if plan is not None and plan.weights), None)
    parts.append(_multiplications(uses or weight_uses(find_weights(dict(model.named_modules())), {}, {})))
    parts += [_conversion(name, plan) for name, plan in plans.items()]
    try_plan(model, job_config)  # at last, because it splits the model
    if entries := schedule_in(job_config):
        parts.append("\n".join(["precision schedule", *(f"  {entry} ({entry.name})" for entry in entries)]))
    if guard := guard_in(job_config):
        settings = job_config.mxnorm.guard
        parts.append(
            f"guard\n  {guard[1]} in all swapped layers for {settings.steps} steps, after a loss that is more than "
            f"{settings.sigmas:g} standard deviations\n  above the mean of the {settings.window} losses before it, or "
            "not finite"
        )
    return "\n\n".join(parts)


def _check_parts(model: torch.nn.Module, job_config) -> None:
    """Raise ConfigError for a model without TorchTitan's names for its parts."""
    missing = [name for name in ("tok_embeddings", "layers", "output") if getattr(model, name, None) is None]
    if missing:
        raise ConfigError(
            f"model.name = {job_config.model.name!r} has no {', '.join(missing)}: doctor --model takes models with "
            "tok_embeddings, layers and output, as TorchTitan's language models have them"
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


def _multiplications(uses: dict[str, WeightUse]) -> str:
    total = sum(use.multiplications for use in uses.values())
    low = sum(use.multiplications * use.quantized for use in uses.values())
    rows = [(name, f"{round(n):,} ({n / total:.1%})") for name, n in (("low precision", low), ("high", total - low))]
    rows.append(("all", f"{round(total):,}; products without a weight, such as attention scores, are not counted"))
    return table("multiplications by weights, per token: the mean of fprop, dgrad and wgrad", rows)


def _conversion(name: str, plan: Plan | None) -> str:
    if plan is None:
        return f"{name}\n  left out here: not a converter of mxtrain; what it changes is not in these numbers"
    return f"{name}: {plan.headline}\n{_grouped(plan.details)}"


def _grouped(details: str) -> str:
    """Join the lines of a conversion that differ in the number of the layer only."""
    counts = Counter(re.sub(r"\blayers\.\d+\b", "layers.*", line.strip()) for line in details.splitlines())
    width = max((len(str(count)) for count in counts.values()), default=0)
    return "\n".join(f"  {count:>{width}} x  {line}" for line, count in counts.items())
