"""MXFP8's casts for ``mxtrain.ops.quantize``, by kernel or in PyTorch. They also serve recipes without a format."""

from collections.abc import Sequence

import torch

from mxtrain.ops.gemm import KERNEL_FORM, Codes, Operand, image_dtype, values_dtype
from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.recipes.recipe import Recipe, RMSEstimate
from mxtrain.reference import casts
from mxtrain.reference.mxnorm import inverse_rms, scale_rows

if HAS_TRITON:
    from mxtrain.kernels.mxfp8 import cast as cast_kernel
    from mxtrain.kernels.mxnorm import mxnorm_cast


def cast(
    parts: Sequence[torch.Tensor],
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    *,
    axis: int = 0,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    as_codes: bool = False,
    source: torch.Tensor | None = None,
    experts: int = 1,
    is_weight: bool = False,
    signs: torch.Tensor | None = None,
    draws: Sequence[torch.Tensor | None] | None = None,
    tensor_scale: torch.Tensor | None = None,
    group: str | None = None,
    ends: torch.Tensor | None = None,
) -> dict[int, Operand | Codes]:
    """Quantize a matrix X [R, C] along each dimension in ``dims``; return the operands by dimension.

    A kernel reads X once for both dimensions.

    Args:
        parts: X, bf16, fp32, or (recipe "unquantized" in mode "reference" only) fp64. Or several matrices of whole
            blocks, which joined along ``axis`` are X. A kernel does not store the joined matrix.
        mode: "native", "emulated" or "reference".
        dims: 1 gives an operand [R, C] that is reduced over C; 0 gives an operand [C, R] that is reduced over R.
            Along dimension 0 the last block may be incomplete.
        row_factor: [R], multiplied in before the cast, in fp32 (fp64 for fp64), without rounding in between.
        column_factor: [C], likewise.
        as_codes: return ``Codes``. For one dimension, and one matrix of whole blocks.
        source: int64 [R]; row i of X is row source[i] of the one matrix in ``parts``, zero where source[i] is negative.
        experts: parts one below the other are so many stacked experts each; X is joined expert by expert.
        is_weight, signs, draws, tensor_scale, group, ends: unused. Only ``mxtrain.ops.nvfp4.cast`` needs them.
    """
    if recipe.format is not None and runs_kernels(mode, parts[0].device.type):
        form = "codes" if as_codes else KERNEL_FORM[mode]
        results = cast_kernel.cast(parts, recipe, dims, form, row_factor, column_factor, axis, source, experts)
        if as_codes:
            return {dim: Codes(*result) for dim, result in results.items()}
        # The kernel transposes codes because the tensor cores need that. Images only need a transposed view.
        return {
            dim: Operand(data.t() if dim == 0 and form == "image" else data, scales)
            for dim, (data, scales) in results.items()
        }
    # Every block lies in one part, so its scale does not depend on other parts.
    x = parts[0] if len(parts) == 1 else casts.joined(parts, axis, experts)
    if source is not None:
        x = casts.rows_in_order(x, source)
    if row_factor is not None:
        x = scale_rows(x, row_factor)
    if column_factor is not None:
        x = casts.at_least_fp32(x) * column_factor
    if as_codes:
        return {dim: _codes(x if dim == 1 else x.t(), recipe, mode) for dim in dims}
    return {dim: _in_pytorch(x, recipe, mode, dim) for dim in dims}


def normalize(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None, as_codes: bool = False
) -> tuple[Operand | Codes, torch.Tensor]:
    """See ``mxtrain.ops.quantize``; likewise the functions below."""
    if recipe.format is not None and runs_kernels(mode, x.device.type):
        result = mxnorm_cast(x, estimate, recipe, "codes" if as_codes else KERNEL_FORM[mode])
        return (Codes if as_codes else Operand)(result.data, result.scales), result.rho
    rho = inverse_rms(x, estimate, recipe)
    return cast([x], recipe, mode, (1,), row_factor=rho, as_codes=as_codes)[1], rho


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    data, scales, _ = codes
    if recipe.format is not None:
        if mode == "native":
            return Operand(data, casts.to_blocked(scales))
        data = casts.dequantize(data, scales, recipe.format, values_dtype(mode))
    # The memory layout of ``cast``, because products in another layout may add up in another order.
    return Operand(data if dim == 1 else data.t().contiguous().t())


def weight_codes(w: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast W [N, D], gain included, as for fprop in every mode: float8_e4m3fn [N, D], float8_e8m0fnu [N, D / 32]."""
    return casts.cast(w, recipe.format, recipe.scale_rounding)


def _codes(x: torch.Tensor, recipe: Recipe, mode: str) -> Codes:
    if recipe.format is None:
        return Codes(x.to(image_dtype(x, mode)))
    return Codes(*casts.cast(x, recipe.format, recipe.scale_rounding))


def _in_pytorch(x: torch.Tensor, recipe: Recipe, mode: str, dim: int) -> Operand:
    if recipe.format is None:
        data = x.to(image_dtype(x, mode))
    elif mode == "native":
        if dim == 0:
            # The tensor cores take both operands with the reduction axis contiguous, in whole blocks.
            x = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % recipe.block_size))
        codes, scales = casts.cast(x, recipe.format, recipe.scale_rounding)
        return Operand(codes, casts.to_blocked(scales))
    else:
        data = casts.image(x, recipe.format, recipe.scale_rounding, dim, image_dtype(x, mode))
    return Operand(data if dim == 1 else data.t())
