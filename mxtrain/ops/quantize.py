"""From a high-precision matrix to a GEMM operand, in whichever form the execution mode multiplies."""

from typing import NamedTuple

import torch

from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.recipes.recipe import Recipe
from mxtrain.reference import casts

if HAS_TRITON:
    from mxtrain.kernels.mxfp8 import cast as cast_kernel

# What the kernels write for each mode that uses them.
KERNEL_FORM = {"native": "blocked", "emulated": "image"}


class Operand(NamedTuple):
    """One operand of a GEMM, a matrix [R, K] quantized in blocks along K, the axis that is reduced.

    Attributes:
        data: native: codes [R, K], of NVFP4 two a byte [R, K / 2]. Emulated and reference: the exact values that codes
            and scales stand for, in bf16 and fp32.
        scales: native: the blocks' scales, E8M0 or E4M3, in the blocked 128x4 layout that the tensor cores read.
            Otherwise None.
        tensor_scale: native NVFP4: the scale of the whole matrix, fp32 []. Otherwise None.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None


def image_dtype(x: torch.Tensor, mode: str) -> torch.dtype:
    """The dtype in which ``mode`` multiplies values that are not codes: bf16, or fp32 (fp64 for fp64) in reference."""
    return torch.promote_types(x.dtype, torch.float32) if mode == "reference" else torch.bfloat16


def quantize(x: torch.Tensor, recipe: Recipe, mode: str, dim: int = 1, **factors) -> Operand:
    """``quantize_along`` for one dimension."""
    return quantize_along(x, recipe, mode, (dim,), **factors)[dim]


def quantize_along(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> dict[int, Operand]:
    """Quantize the matrix ``x`` along each of ``dims`` and return operands that are reduced along them, by dimension.

    A kernel reads ``x`` once for all of it. Not for NVFP4, where casts depend on what is cast: see
    ``mxtrain.ops.nvfp4_operands``.

    Args:
        x: [R, C], bf16, fp32, or (recipe "unquantized" in mode "reference" only) fp64.
        mode: "native", "emulated" or "reference".
        dims: 1 gives an operand [R, C] that is reduced over C, 0 an operand [C, R] that is reduced over R. Along
            dimension 0 the last block may be incomplete.
        row_factor: [R], multiplied in before the cast, in fp32 (fp64 for fp64), without rounding in between.
        column_factor: [C], likewise.

    Raises:
        ValueError: for an NVFP4 recipe.
    """
    if recipe.is_nvfp4:
        raise ValueError(f"recipe {recipe}: its operands come from mxtrain.ops.nvfp4_operands")
    if recipe.format is not None and runs_kernels(mode, x.device.type):
        form = KERNEL_FORM[mode]
        results = cast_kernel.cast(x, recipe, dims, form, row_factor, column_factor)
        # The kernel transposes codes, which the tensor cores need, but not images, which a view transposes.
        return {
            dim: Operand(data.t() if dim == 0 and form == "image" else data, scales)
            for dim, (data, scales) in zip(dims, results)
        }
    if row_factor is not None:
        x = casts.at_least_fp32(x) * row_factor.unsqueeze(1)
    if column_factor is not None:
        x = casts.at_least_fp32(x) * column_factor
    return {dim: _quantize_in_pytorch(x, recipe, mode, dim) for dim in dims}


def _quantize_in_pytorch(x: torch.Tensor, recipe: Recipe, mode: str, dim: int) -> Operand:
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
