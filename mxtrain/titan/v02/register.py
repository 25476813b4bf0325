"""Make mxtrain's converters and models known to TorchTitan 0.2.2."""

import functools

import torch
from torchtitan.models.moe import kernels, utils
from torchtitan.protocols.model_converter import register_model_converter

from mxtrain.conversion.converters import CONVERTERS
from mxtrain.titan.converters import titan_converter
from mxtrain.titan.v02.models.train_specs import register_train_specs
from mxtrain.titan.v02.repairs.cpu_attention import use_gathered_attention
from mxtrain.titan.v02.repairs.cpu_histc import histc


def register() -> None:
    """Register all converters, and mxtrain's version of every supported model.

    On a CPU, mixtures count tokens as integers, expert parallelism orders them without Triton, and context parallelism
    gathers keys and values.
    """
    if not torch.cuda.is_available():
        utils.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
        torch.histc = histc
        use_gathered_attention()
    for name in CONVERTERS:
        register_model_converter(functools.partial(titan_converter, name), name)
    register_train_specs()
