"""The check of a job against the machine and its model, before anything is built."""

from types import SimpleNamespace

import torch

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Settings
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.titan.converters import active_settings
from mxtrain.titan.engine import engine


def check_job(settings: Settings, machine: Machine) -> None:
    """Check what ``read_settings`` has read against the machine and the model.

    Raises:
        ConfigError: for every mistake that shows without building the model or reading text.
    """
    check_machine(settings, machine)
    check_model(settings.values)
    engine().check_model_layout(settings, machine.has_gpus)
    compilation = settings.values.compile
    if compilation.enable and compilation.backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise ConfigError(
            f"compile.backend = {compilation.backend!r} is not known to torch.compile: allowed are 'inductor', "
            "'aot_eager', and what else torch._dynamo.list_backends(exclude_tags=()) names"
        )


def check_model(job: SimpleNamespace) -> None:
    """Raise ConfigError for unknown names, wrong settings of converters, and sizes that the model cannot have.

    Args:
        job: TorchTitan's job config, or ``Settings.values``.
    """
    engine().check_names(job)
    active_settings(job)
    engine().check_model_args(job)
