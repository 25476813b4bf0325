"""MXNorm: its backward, and the public ``mxnorm_cast``. ``FormatOps.normalize`` is the forward."""

import math

import torch

from mxtrain.formats import mxnorm as reference
from mxtrain.formats.estimate import Estimator, P, RMSEstimate
from mxtrain.formats.hardware import HAS_TRITON, Mode, resolve_mode, runs_kernels
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import DEFAULT_RECIPE, LinearRecipe, ScaleRounding

if HAS_TRITON:
    from mxtrain.norms import mxnorm_backward as kernels


def norm_backward(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor, mode: str, is_compiled: bool) -> torch.Tensor:
    """g = dL/dxhat [T, D] -> the straight-through gradient dx [T, D]; see ``mxtrain.formats.mxnorm``."""
    # When compiled, the formula fuses with the sum over the norm's consumers and with the residual's gradient. Beside
    # a kernel, these are separate passes: 525k instead of 542k tokens/s for an 88M model, 59.2k instead of 60.2k for
    # 1.5B (H200).
    if runs_kernels(mode, x.device.type) and not is_compiled:
        return kernels.norm_backward(g, x, rho)
    return reference.norm_backward(g, x, rho)


def fold_backward(
    g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = dL/d(W diag(gain)) [N, D] -> (dW [N, D], dgain [D]); see ``mxtrain.formats.mxnorm``."""
    if runs_kernels(mode, weight.device.type):
        return kernels.fold_backward(g, weight, gain)
    return reference.fold_backward(g, weight, gain)


# Plain PyTorch would give rho a gradient, and kernels would give codes a useless one.
@torch.no_grad()
def mxnorm_cast(
    x: torch.Tensor,
    p: P = 2,
    recipe: str | LinearRecipe = DEFAULT_RECIPE,
    eps: float = 1e-5,
    estimator: Estimator = "pre_round",
    scale_rounding: ScaleRounding | None = None,
    mode: Mode = "auto",
) -> tuple[torch.Tensor, ...]:
    """Normalize and cast every row. The inverse RMS comes from the block maxima that the cast needs anyway.

    Codes and scales are bit-identical to torchao's cast of the fp32 product x * rho. A NaN makes all scales of its row
    NaN; an infinity makes the scale of its block NaN. A zero row gives zeros if eps is not 0 in fp32. No finite row is
    too large: squares are summed in fp64.

    NVFP4's tensor scale is a power of two. Recipe "nvfp4" takes it from the bound of the norm's output,
    ``mxtrain.static_tensor_scale(D, p, estimator)``. "nvfp4_dynamic" takes it from the largest |x * rho|. "nvfp4_row"
    gives every row a tensor scale from the row's largest |x * rho|.

    Source: arXiv 2603.13180; torchao ``to_mx`` for the cast.

    Args:
        x: bf16 or fp32, [..., D] with D a multiple of the recipe's block size (32 for MXFP8, 16 for NVFP4), and at
            most 65536 on a GPU.
        p: exponent of the mean over block maxima, 1 or 2.
        recipe: a name in ``mxtrain.formats.recipe.RECIPES`` with a format, or a Recipe. Of a mixed recipe, the recipe
            for fprop counts.
        eps: added to the squared RMS estimate.
        estimator: "pre_round", "post_round" or "exact" (see ``mxtrain.formats.estimate.RMSEstimate``).
        scale_rounding: "rceil", "rceil_0_18" or "floor", not for NVFP4. None takes the recipe's ("rceil" for named
            recipes).
        mode: "auto", or a mode that this hardware has. The mode chooses between kernel and plain PyTorch. Results
            differ at most in the last bits of rho.

    Returns:
        codes: float8_e4m3fn, shape of ``x``; for NVFP4 uint8 [..., D / 2], two elements per byte, the first in the low
            half.
        scales: float8_e8m0fnu, [..., D / 32]; for NVFP4 float8_e4m3fn [..., D / 16].
        rho: fp32 [...], the inverse RMS estimate.
        tensor_scale: fp32 [] for "nvfp4_dynamic", fp32 [...] for "nvfp4_row". Other recipes do not return it.

    Raises:
        ConfigError: for an unknown p, recipe, estimator, scale_rounding or mode, or a mode that this hardware lacks.
        ValueError: for a dtype or last dimension that cannot be cast.
    """
    recipe = get_recipe(get_recipe(recipe).fprop, scale_rounding=scale_rounding).fprop
    estimate = RMSEstimate.for_recipe(recipe, p, estimator, eps)
    mode = resolve_mode(mode, x.device.type)
    if recipe.format is None:
        raise ValueError(f"recipe {recipe.name!r} has no format to cast to")
    if x.dtype not in (torch.bfloat16, torch.float32):
        raise ValueError(f"x is {x.dtype}; it must be bfloat16 or float32")
    if not x.ndim or not x.shape[-1] or x.shape[-1] % recipe.block_size:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be a multiple of {recipe.block_size}")
    leading = x.shape[:-1]
    rows = x.reshape(math.prod(leading), x.shape[-1])
    cast, rho = recipe.ops.normalize(rows, estimate, recipe, mode, as_codes=True)
    codes, scales = (t.view(*leading, t.shape[1]) for t in (cast.data, cast.scales))
    tensor_scale = ()
    if recipe.tensor_scale in ("dynamic", "row"):
        tensor_scale = (cast.scale.view(leading if recipe.tensor_scale == "row" else ()),)
    return codes, scales, rho.view(leading), *tensor_scale
