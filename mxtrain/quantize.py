"""From a high-precision matrix to a GEMM operand, in whichever form the execution mode multiplies."""

from typing import NamedTuple

import torch

from mxtrain.hardware import resolve_mode
from mxtrain.recipe import Recipe, RMSEstimate, get_recipe
from mxtrain.reference import casts
from mxtrain.reference.mxnorm import inverse_rms, scale_rows


class Operand(NamedTuple):
    """One operand of a GEMM, a matrix [R, K] quantized in blocks along K, the axis that is reduced.

    Attributes:
        data: native: codes [R, K]. Emulated and reference: the exact values that codes and scales stand for,
            in bf16 and fp32.
        scales: native: E8M0 scales in the blocked 128x4 layout that the tensor cores read. Otherwise None.
    """

    data: torch.Tensor
    scales: torch.Tensor | None


def image_dtype(x: torch.Tensor, mode: str) -> torch.dtype:
    """The dtype in which ``mode`` multiplies values that are not codes: bf16, or fp32 (fp64 for fp64) in reference."""
    return torch.promote_types(x.dtype, torch.float32) if mode == "reference" else torch.bfloat16


def quantize(x: torch.Tensor, recipe: Recipe, mode: str, dim: int = 1) -> Operand:
    """Quantize the matrix ``x`` along ``dim`` and return it as an operand that is reduced along ``dim``.

    Args:
        x: [R, C], bf16, fp32, or (recipe "unquantized" in mode "reference" only) fp64.
        mode: "native", "emulated" or "reference".
        dim: 1 gives an operand [R, C] that is reduced over C, 0 an operand [C, R] that is reduced over R. Along
            dimension 0 the last block may be incomplete.
    """
    if recipe.format is None:
        data = x.to(image_dtype(x, mode))
        return Operand(data if dim == 1 else data.t(), None)
    if mode == "native":
        if dim == 0:
            # The tensor cores take both operands with the reduction axis contiguous, in whole blocks.
            x = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % recipe.block_size))
        codes, scales = casts.cast(x, recipe.format, recipe.scale_rounding)
        return Operand(codes, casts.to_blocked(scales))
    data = casts.image(x, recipe.format, recipe.scale_rounding, dim, image_dtype(x, mode))
    return Operand(data if dim == 1 else data.t(), None)


def mxnorm_cast(
    x: torch.Tensor,
    p: int = 2,
    recipe: str | Recipe = "mxfp8",
    eps: float = 1e-5,
    estimator: str = "pre_round",
    scale_rounding: str | None = None,
    mode: str = "auto",
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """MXNorm of every row and its cast: the inverse RMS comes from the block maxima that the cast needs anyway.

    Codes and scales are bit-identical to torchao's cast of the fp32 product x * rho. A row that holds a NaN becomes
    NaN scales; in a row that holds an infinity its block does. A zero row gives zeros.

    Source: arXiv 2603.13180; torchao ``to_mx`` for the cast.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of the recipe's block size (32 for MXFP8).
        p: exponent of the mean over block maxima, 1 or 2.
        recipe: a name in ``mxtrain.recipe.RECIPES`` with a format, or a Recipe.
        eps: added to the squared RMS estimate.
        estimator: "pre_round", "post_round" or "exact" (see ``mxtrain.recipe.RMSEstimate``).
        scale_rounding: "rceil" or "floor"; None keeps the recipe's own ("rceil" for named recipes).
        mode: "auto", or a mode this hardware has; the result does not depend on it.

    Returns:
        codes: float8_e4m3fn, shape of ``x``.
        scales: float8_e8m0fnu, [..., D / 32].
        rho: fp32 [...], the inverse RMS estimate.

    Raises:
        ConfigError: for an unknown p, recipe, estimator, scale_rounding or mode, or a mode this hardware lacks.
        ValueError: for a dtype or last dimension that cannot be cast.
    """
    recipe = get_recipe(recipe, scale_rounding)
    estimate = RMSEstimate.for_recipe(recipe, p, estimator, eps)
    resolve_mode(mode, x.device.type)
    if recipe.format is None:
        raise ValueError(f"recipe {recipe.name!r} has no format to cast to")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"dtype {x.dtype} of x {tuple(x.shape)}: expected bfloat16 or float32")
    rho = inverse_rms(x, estimate, recipe)
    codes, scales = casts.cast(scale_rows(x, rho), recipe.format, recipe.scale_rounding)
    return codes, scales, rho
