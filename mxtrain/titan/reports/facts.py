"""Facts about a run: what ``run.json`` holds, and the line about the model on the terminal."""

import importlib.metadata
import os
import platform

import torch
from torchtitan.tools import utils

import mxtrain
from mxtrain.titan.converters import active_settings
from mxtrain.titan.models.model_args import given_in


def run_facts(job_config) -> dict:
    """Return the contents of ``run.json`` without ``wandb``: model, numerics, versions and device, all as JSON."""
    return {
        "name": os.path.basename(os.path.abspath(job_config.job.dump_folder)),
        "model": job_config.model.name,
        "flavor": job_config.model.flavor,
        **({"model_args": sizes} if (sizes := given_in(job_config)) else {}),
        "converters": list(job_config.model.converters),
        **active_settings(job_config),
        "precision": _precision(job_config),
        "versions": package_versions(),
        "device": _device(),
        "world_size": _world_size(),
    }


def package_versions() -> dict[str, str | None]:
    """Return name -> version of mxtrain, Python and what computes; None for a package that is not installed."""
    return {
        "mxtrain": mxtrain.__version__,
        "python": platform.python_version(),
        **{package: _version(package) for package in ("torch", "torchtitan", "torchao", "triton")},
    }


def describe_model(job_config, model: torch.nn.Module) -> str:
    """Return one line: the model's name, flavor and parameters, the device, the processes and the precision."""
    model_config, processes = job_config.model, _world_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{model_config.name} {model_config.flavor}{' with [model_args]' if given_in(job_config) else ''}: "
        f"{parameters:,} parameters, {_device()}, "
        f"{processes} process{'es' if processes > 1 else ''}, {_precision(job_config)}"
    )


def _precision(job_config) -> str:
    training = job_config.training
    return f"{training.mixed_precision_param} compute, {training.dtype} parameters"


def _device() -> str:
    return utils.device_module.get_device_name(torch.device(utils.device_type))


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
