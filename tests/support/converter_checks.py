"""Models and configs for tests of TorchTitan's converters."""

import copy
from importlib import import_module

import torch
from torchtitan.config import JobConfig

from mxtrain.titan.job_config import parse_job_config


def model_and_args(name, flavor, **changes):
    spec = import_module(f"torchtitan.models.{name}").get_train_spec()
    args = copy.deepcopy(spec.model_args[flavor])
    args.update_from_config(JobConfig())
    for field, value in changes.items():
        setattr(args, field, value)
    with torch.device("meta"):
        return spec.model_cls(args), args


def config(*flags, converter="mxnorm"):
    return parse_job_config([f"--model.converters={converter}", *flags])


def count(model, kind):
    return sum(type(m) is kind for m in model.modules())
