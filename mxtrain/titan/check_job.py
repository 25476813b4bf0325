"""The check of a job against the machine and its model, before anything is built."""

from types import SimpleNamespace

import torch
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter, train_spec

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.settings.fields import Settings
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import import_own
from mxtrain.titan.check_layout import check_model_layout
from mxtrain.titan.converters import active_settings
from mxtrain.titan.data import check_datasets
from mxtrain.titan.models.model_args import check_model_args


def check_job(settings: Settings, machine: Machine) -> None:
    """Check what ``read_settings`` has read against the machine and the model.

    Raises:
        ConfigError: for every mistake that shows without building the model or reading text.
    """
    check_machine(settings, machine)
    check_model(settings.values)
    check_model_layout(settings, machine.has_gpus)
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
    check_names(job)
    active_settings(job)
    check_model_args(job)


def check_names(job: SimpleNamespace) -> None:
    """Raise ConfigError for a model, flavor, converter or dataset that nobody has registered."""
    if own := job.experimental.custom_import:
        import_own("experimental.custom_import", own)  # it registers names; TorchTitan imports it later
    models = sorted(_supported_models - {"flux"} | train_spec._extra_train_specs.keys())  # flux has its own trainer
    require_one_of("model.name", job.model.name, models)
    flavors = train_spec.get_train_spec(job.model.name).model_args
    require_one_of("model.flavor", job.model.flavor, flavors)
    for name in job.model.converters:
        require_one_of("model.converters", name, model_converter._registry_model_converter_cls)
    check_datasets(job)
