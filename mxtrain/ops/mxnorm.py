"""MXNorm of a matrix, forward and backward, by kernel or in plain PyTorch as the execution mode says."""

import math

import torch

from mxtrain.ops.hardware import HAS_TRITON, resolve_mode, runs_kernels
from mxtrain.ops.nvfp4_operands import activation, operand_of
from mxtrain.ops.quantize import KERNEL_FORM, Operand, quantize
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import casts, nvfp4
from mxtrain.reference import mxnorm as reference

if HAS_TRITON:
    from mxtrain.kernels.mxfp8 import norm_cast as mxnorm_cast_kernel
    from mxtrain.kernels.norm import fold_backward as fold_backward_kernel
    from mxtrain.kernels.norm import straight_through as norm_backward_kernel
    from mxtrain.kernels.nvfp4 import norm_cast as nvfp4_norm_kernel


def normalize(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str) -> tuple[Operand, torch.Tensor]:
    """x [T, D] -> x * rho as a GEMM operand quantized along D, and rho, fp32 [T]."""
    if recipe.is_nvfp4:
        return _normalize_to_nvfp4(x, estimate, recipe, mode)
    if recipe.format is not None and runs_kernels(mode, x.device.type):
        result = mxnorm_cast_kernel.mxnorm_cast(x, estimate, recipe, KERNEL_FORM[mode])
        return Operand(result.data, result.scales), result.rho
    rho = reference.inverse_rms(x, estimate, recipe)
    return quantize(x, recipe, mode, row_factor=rho), rho


def _normalize_to_nvfp4(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str
) -> tuple[Operand, torch.Tensor]:
    static = _static_tensor_scale(x, estimate, recipe)
    if static is not None and runs_kernels(mode, x.device.type):
        result = nvfp4_norm_kernel.nvfp4_norm(x, estimate, static, KERNEL_FORM[mode])
        tensor_scale = torch.full((), static, device=x.device)
        return operand_of(result.data, result.scales, tensor_scale, mode), result.rho
    rho = reference.inverse_rms(x, estimate, recipe)
    return activation(x, mode, rho, static), rho


def _static_tensor_scale(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe) -> float | None:
    """The NVFP4 tensor scale of x * rho that is known beforehand; None if the recipe takes it from the values."""
    if recipe.tensor_scale == "dynamic":
        return None
    return nvfp4.static_tensor_scale(x.shape[-1], estimate.p, estimate.estimator, estimate.constant)


def norm_backward(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor, mode: str) -> torch.Tensor:
    """The straight-through gradient dx [T, D] from g = dL/d(x * rho); see ``mxtrain.reference.mxnorm``."""
    # Compiled, the formula fuses with the sum over the norm's consumers and with the residual's gradient, which beside
    # a kernel are passes of their own: 542k against 525k tokens/s of an 88M model, 60.2k against 59.2k of 1.5B (H200).
    if runs_kernels(mode, x.device.type) and not torch.compiler.is_compiling():
        return norm_backward_kernel.norm_backward(g, x, rho)
    return reference.norm_backward(g, x, rho)


def fold_backward(
    g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dW [N, D], dgain [D]) from g = dL/d(W diag(gain)); see ``mxtrain.reference.mxnorm``."""
    if runs_kernels(mode, weight.device.type):
        return fold_backward_kernel.fold_backward(g, weight, gain)
    return reference.fold_backward(g, weight, gain)


def mxnorm_cast(
    x: torch.Tensor,
    p: int = 2,
    recipe: str | Recipe = "mxfp8",
    eps: float = 1e-5,
    estimator: str = "pre_round",
    scale_rounding: str | None = None,
    mode: str = "auto",
) -> tuple[torch.Tensor, ...]:
    """MXNorm of every row and its cast: the inverse RMS comes from the block maxima that the cast needs anyway.

    Codes and scales are bit-identical to torchao's cast of the fp32 product x * rho. A row that holds a NaN becomes
    NaN scales; in a row that holds an infinity its block does. A zero row gives zeros.

    NVFP4's tensor scale is a power of two: with recipe "nvfp4" the one that the bound of the norm's output asks for,
    ``mxtrain.static_tensor_scale(D, p, estimator)``, with "nvfp4_dynamic" that of the largest |x * rho|.

    Source: arXiv 2603.13180; torchao ``to_mx`` for the cast.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of the recipe's block size (32 for MXFP8, 16 for NVFP4), on a GPU
            at most 65536.
        p: exponent of the mean over block maxima, 1 or 2.
        recipe: a name in ``mxtrain.recipes.recipe.RECIPES`` with a format, or a Recipe; of a mixed one, that of fprop.
        eps: added to the squared RMS estimate.
        estimator: "pre_round", "post_round" or "exact" (see ``mxtrain.recipes.rms_estimate.RMSEstimate``).
        scale_rounding: "rceil" or "floor"; None keeps the recipe's own ("rceil" for named recipes). Not for NVFP4.
        mode: "auto", or a mode this hardware has. It decides between kernel and plain PyTorch, not the result, but for
            the last bits of rho.

    Returns:
        codes: float8_e4m3fn, shape of ``x``; for NVFP4 uint8 [..., D / 2], two elements a byte, the first in the low
            half.
        scales: float8_e8m0fnu, [..., D / 32]; for NVFP4 float8_e4m3fn [..., D / 16].
        rho: fp32 [...], the inverse RMS estimate.
        tensor_scale: only with a dynamic one: fp32 [].

    Raises:
        ConfigError: for an unknown p, recipe, estimator, scale_rounding or mode, or a mode this hardware lacks.
        ValueError: for a dtype or last dimension that cannot be cast.
    """
    recipe = get_recipe(recipe, scale_rounding).fprop
    estimate = RMSEstimate.for_recipe(recipe, p, estimator, eps)
    mode = resolve_mode(mode, x.device.type)
    if recipe.format is None:
        raise ValueError(f"recipe {recipe.name!r} has no format to cast to")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {x.dtype} of x {tuple(x.shape)}: expected bfloat16 or float32")
    if not x.ndim or x.shape[-1] % recipe.block_size:
        raise ValueError(f"x {tuple(x.shape)}: expected a last dimension that is a multiple of {recipe.block_size}")
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if recipe.is_nvfp4:
        codes, scales, rho, *tensor_scale = _nvfp4_cast(rows, estimate, recipe, mode)
    elif runs_kernels(mode, x.device.type):
        codes, scales, rho, *tensor_scale = mxnorm_cast_kernel.mxnorm_cast(rows, estimate, recipe, "codes")[:3]
    else:
        tensor_scale = []
        rho = reference.inverse_rms(rows, estimate, recipe)
        codes, scales = casts.cast(reference.scale_rows(rows, rho), recipe.format, recipe.scale_rounding)
    leading = x.shape[:-1]
    codes, scales = (t.view(*leading, t.shape[1]) for t in (codes, scales))
    return codes, scales, rho.view(leading), *tensor_scale


def _nvfp4_cast(rows: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str) -> tuple[torch.Tensor, ...]:
    static = _static_tensor_scale(rows, estimate, recipe)
    if static is not None and runs_kernels(mode, rows.device.type):
        return nvfp4_norm_kernel.nvfp4_norm(rows, estimate, static, "codes")[:3]
    rho = reference.inverse_rms(rows, estimate, recipe)
    xhat = reference.scale_rows(rows, rho)
    if static is not None:
        return *nvfp4.cast(xhat, static), rho
    tensor_scale = nvfp4.power_of_two_tensor_scale(xhat)
    return *nvfp4.cast(xhat, tensor_scale), rho, tensor_scale
