"""Checks of what layers are given. Each raises an error that names the argument, its value, and what is allowed."""

from traceback import walk_stack

import torch
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointFunction

from mxtrain.errors import ConfigError
from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.once_differentiable import refuse_transforms
from mxtrain.recipes.recipe import LinearRecipe

DTYPES = (torch.bfloat16, torch.float32)


def check_input(x: torch.Tensor, features: int, weight: torch.Tensor | None, recipe: LinearRecipe, mode: str) -> None:
    """Raise ValueError unless a layer with this weight, recipe and mode takes x [..., features].

    Raises ConfigError for DTensors, unless nothing is quantized, and RuntimeError in a transform of ``torch.func``.
    """
    refuse_transforms()
    if any(isinstance(tensor, DTensor) for tensor in (x, weight)) and any(gemm.format for gemm in recipe.gemms):
        raise ConfigError(
            "a quantized layer got a DTensor: PyTorch's tensor parallelism (parallelize_module) does not split its "
            "casts. Keep the layer with filter_fqns, or train with 'mxtrain train', which splits them"
        )
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"x {tuple(x.shape)}: expected a last dimension of {features}")
    check_dtype("x", x.dtype, recipe, mode)
    if weight is not None:
        check_dtype("weight", weight.dtype, recipe, mode)
        if weight.device != x.device:
            raise ValueError(f"weight is on {weight.device}: expected {x.device}, where x is")
        if (x.dtype in DTYPES) != (weight.dtype in DTYPES):
            raise ValueError(f"x of {x.dtype} and weight of {weight.dtype}: expected float64 for both or for none")


def check_dtype(name: str, dtype: torch.dtype, recipe: LinearRecipe, mode: str) -> None:
    """Raise ValueError for a dtype that would be rounded before its cast. float64 needs GEMMs in float64."""
    if dtype in DTYPES:
        return
    if dtype != torch.float64:
        raise ValueError(f"{name} of {dtype}: expected bfloat16 or float32")
    if mode != "reference" or any(gemm.format is not None for gemm in recipe.gemms):
        raise ValueError(
            f"{name} of {dtype} with recipe {recipe.name!r} in mode {mode!r}: expected bfloat16 or float32; float64 "
            "needs recipe 'unquantized' in mode 'reference'"
        )


def not_a_norm_result(x) -> Exception:
    """Return the error for an x of MXNormLinear that is not the result of an MXNorm."""
    if isinstance(x, tuple) and len(x) == len(NormedInput._fields):
        return ConfigError(
            "a checkpoint with use_reentrant=True around an MXNorm makes its result a plain tuple: set "
            "use_reentrant=False"
        )
    return TypeError(f"MXNormLinear takes the result of an MXNorm, not {type(x).__name__}")


def check_norm_result(normed: NormedInput, weight: torch.Tensor) -> None:
    """Raise an error for an MXNorm's result that would give a linear with this weight wrong gradients, or none.

    In a compiled graph only the dtype is checked: Dynamo cannot trace the rest.

    Raises:
        ConfigError: FSDP or a reentrant checkpoint between the norm and the linear has made the result useless.
        RuntimeError: x was written to after the norm, as PyTorch raises it for saved tensors.
    """
    h, gain = normed.h, normed.gain
    if normed.rho.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the result of an MXNorm was cast to {normed.rho.dtype} before its linears: set cast_forward_inputs=False "
            "in FSDP's mixed precision of modules between the norm and its linears"
        )
    if torch.compiler.is_compiling():
        return
    if gain is not None and gain.untyped_storage().size() == 0:
        raise ConfigError(
            "the gain of an MXNorm was freed before its linears: let FSDP shard the norm together with its linears, or "
            "a module that holds them all"
        )
    if h.requires_grad and not torch.is_grad_enabled() and _in_reentrant_checkpoint():
        raise ConfigError(
            "a checkpoint with use_reentrant=True between an MXNorm and its linears loses their gradients: set "
            "use_reentrant=False"
        )
    # PyTorch counts the writes only from the linear on, which saves x, or from the norm on if x needs a gradient.
    needs_x = weight.requires_grad or (gain is not None and gain.requires_grad)
    of_x, writes_before = normed.x_writes or (None, 0)
    if of_x == id(normed.x) and needs_x and torch.is_grad_enabled() and normed.x._version > writes_before:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: the input "
            f"{list(normed.x.shape)} of an MXNorm is at version {normed.x._version} before its linears; expected "
            f"version {writes_before}, which was normalized"
        )


def _in_reentrant_checkpoint() -> bool:
    return any(frame.f_code is CheckpointFunction.forward.__code__ for frame, _ in walk_stack(None))
