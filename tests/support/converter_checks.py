"""Models and configs for tests of TorchTitan's converters."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch
import torch.nn as nn

from mxtrain.titan.converters import titan_converter
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import engine


def model_and_args(name, flavor, **changes):
    """A model of TorchTitan 0.2.2 and its sizes."""
    spec = import_module(f"torchtitan.models.{name}").get_train_spec()
    args = copy.deepcopy(spec.model_args[flavor])
    args.update_from_config(parse_job_config([]))
    for field, value in changes.items():
        setattr(args, field, value)
    with torch.device("meta"):
        return spec.model_cls(args), args


def config(*flags, converter="mxnorm"):
    return parse_job_config([f"--model.converters={converter}", *flags])


@contextmanager
def converted(job_config) -> Iterator[dict[str, nn.Module]]:
    """The modules of a job's model by name after conversion. While active, those that stay have PyTorch's classes."""
    model = engine().build_on_meta(job_config)
    with engine().convertible(model):
        for name in job_config.model.converters:
            titan_converter(name, job_config).convert(model)
        yield dict(model.named_modules())


def count(model, kind):
    return sum(type(m) is kind for m in model.modules())
