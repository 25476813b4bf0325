"""Settings that do nothing in a run because it is too short for them, or lacks what they need."""

from collections.abc import Iterator

from mxtrain.settings.mxnorm_section import fallback_of, quantizing_among
from mxtrain.titan.converters import KERNEL_CONVERTERS, MXNORM_KEYS
from mxtrain.titan.schedule import guard_in


def without_effect(job_config) -> Iterator[str]:
    """Yield a line for the user per such setting. A shorter trial of a config is no mistake, so it may run."""
    steps, checkpoint = job_config.training.steps, job_config.checkpoint
    if not checkpoint.enable and checkpoint.interval <= steps:
        yield (
            f"no step of this run is saved: checkpoint.interval = {checkpoint.interval} has no effect without "
            "checkpoint.enable = true"
        )
    if every := job_config.mxnorm.diagnostics.every:
        setting = f"nothing is measured: mxnorm.diagnostics.every = {every}"
        if every > steps:
            yield f"{setting}, and the run has {steps} steps"
        elif not quantizing_among(job_config.model.converters):
            yield f"{setting} has no effect without the converter mxnorm or mx_linear"
    if not quantizing_among(job_config.model.converters):
        guard = fallback_of(job_config.mxnorm, job_config.mxnorm.guard)
        for name, value in (("schedule", job_config.mxnorm.schedule), ("guard", guard)):
            if value:
                yield f"mxnorm.{name} has no effect without the converter mxnorm or mx_linear"
    elif "mxnorm" not in job_config.model.converters:
        section = job_config.mxnorm
        for name in MXNORM_KEYS:
            if getattr(section, name) != getattr(type(section), name):
                yield f"mxnorm.{name} = {getattr(section, name)!r} has no effect with the converter mx_linear"
    for converter in KERNEL_CONVERTERS:
        section = getattr(job_config, converter.section)
        if converter.name not in job_config.model.converters and section != type(section)():
            yield f"[{converter.section}] has no effect without the converter {converter.name}"
    window = job_config.mxnorm.guard.window
    if guard_in(job_config) is not None and window >= steps:
        yield (
            f"the guard cannot see a spike: it knows one by the losses of the {window} steps before "
            f"(mxnorm.guard.window), and the run has {steps} steps"
        )
