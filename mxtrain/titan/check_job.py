"""The check of a job against the machine and its model, before a text is read and weights are made."""

import torch

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Settings
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.data import check_data
from mxtrain.titan.job_config import check_model, job_config_of
from mxtrain.titan.releases import engine


def check_job(settings: Settings, machine: Machine) -> None:
    """Check what ``read_settings`` has read against the machine and the model.

    Raises:
        ConfigError: for every mistake that shows without the model's weights and the content of its text.
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
    job_config = job_config_of(settings)
    check_data(job_config)
    if job_config.model.converters:
        convert_on_meta(job_config, engine().build_on_meta(job_config))
