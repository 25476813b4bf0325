"""MXNorm of a matrix, forward and backward."""

import torch

from mxtrain.ops.codes import Codes
from mxtrain.ops.gemm import Operand
from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.ops.quantize import module_of
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import mxnorm as reference

if HAS_TRITON:
    from mxtrain.kernels.norm import fold_backward as fold_backward_kernel
    from mxtrain.kernels.norm import straight_through as norm_backward_kernel


def normalize(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str) -> tuple[Operand, torch.Tensor]:
    """x [T, D] -> xhat = x * rho as fprop's operand [T, D], and rho, fp32 [T]. By one kernel if the format has one."""
    return module_of(recipe).normalize(x, estimate, recipe, mode)


def normalized_codes(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None
) -> tuple[Codes, torch.Tensor]:
    """As ``normalize``, but codes and scales in every mode; ``group`` holds other rows of the same matrix."""
    return module_of(recipe).normalized_codes(x, estimate, recipe, mode, group)


def norm_backward(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor, mode: str, is_compiled: bool) -> torch.Tensor:
    """g = dL/dxhat [T, D] -> the straight-through gradient dx [T, D]; see ``mxtrain.reference.mxnorm``."""
    # When compiled, the formula fuses with the sum over the norm's consumers and with the residual's gradient. Beside
    # a kernel, these are separate passes: 525k instead of 542k tokens/s for an 88M model, 59.2k instead of 60.2k for
    # 1.5B (H200).
    if runs_kernels(mode, x.device.type) and not is_compiled:
        return norm_backward_kernel.norm_backward(g, x, rho)
    return reference.norm_backward(g, x, rho)


def fold_backward(
    g: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor, mode: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """g = dL/d(W diag(gain)) [N, D] -> (dW [N, D], dgain [D]); see ``mxtrain.reference.mxnorm``."""
    if runs_kernels(mode, weight.device.type):
        return fold_backward_kernel.fold_backward(g, weight, gain)
    return reference.fold_backward(g, weight, gain)
