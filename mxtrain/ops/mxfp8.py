"""GEMM operands in MXFP8, or left in high precision for recipes without a format."""

from collections.abc import Mapping, Sequence

import torch

from mxtrain.ops.codes import Codes
from mxtrain.ops.gemm import KERNEL_FORM, Operand, image_dtype, values_dtype
from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import casts
from mxtrain.reference.mxnorm import inverse_rms, scale_rows

if HAS_TRITON:
    from mxtrain.kernels.mxfp8 import cast as cast_kernel
    from mxtrain.kernels.mxfp8 import joined_cast as joined_cast_kernel
    from mxtrain.kernels.mxfp8 import norm_cast as norm_cast_kernel


# One function per role, as in mxtrain.ops.nvfp4; mxtrain.ops.quantize documents them. MXFP8 ignores signs, draws and
# groups.


def activation(x: torch.Tensor, recipe: Recipe, mode: str, group: str | None = None) -> Operand:
    return quantize(x, recipe, mode, (1,))[1]


def activation_along_tokens(
    x: torch.Tensor, recipe: Recipe, mode: str, rho: torch.Tensor | None, signs, group: str | None = None
) -> Operand:
    return quantize(x, recipe, mode, (0,), row_factor=rho)[0]


def weight(
    w: torch.Tensor, recipe: Recipe, mode: str, dim: int, gain: torch.Tensor | None, group: str | None = None
) -> Operand:
    return quantize(w, recipe, mode, (dim,), column_factor=gain)[dim]


def weight_for_both(
    w: torch.Tensor, recipe: Recipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    operands = quantize(w, recipe, mode, (1, 0), column_factor=gain)
    return operands[1], operands[0]


def weight_codes(w: torch.Tensor, recipe: Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast W [N, D], gain included, as ``weight`` does for fprop in every mode: to codes and plain scales.

    Returns:
        codes: float8_e4m3fn [N, D].
        scales: float8_e8m0fnu [N, D / 32].
    """
    return casts.cast(w, recipe.format, recipe.scale_rounding)


def gradient(
    dy: torch.Tensor, recipe: Recipe, mode: str, dims: tuple[int, ...], signs, draws, group: str | None = None
) -> dict[int, Operand]:
    return quantize(dy, recipe, mode, dims)


def weights(
    ws: Sequence[torch.Tensor], recipe: Recipe, mode: str, dim: int, gain: torch.Tensor | None, group: str | None = None
) -> Operand:
    return quantize_joined(ws, 0, recipe, mode, (dim,), gain)[dim]


def weights_for_both(
    ws: Sequence[torch.Tensor], recipe: Recipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    operands = quantize_joined(ws, 0, recipe, mode, (1, 0), gain)
    return operands[1], operands[0]


def gradients(
    dys: Sequence[torch.Tensor],
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    signs,
    draws,
    group: str | None = None,
) -> dict[int, Operand]:
    return quantize_joined(dys, 1, recipe, mode, dims)


def normalize(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str) -> tuple[Operand, torch.Tensor]:
    if recipe.format is not None and runs_kernels(mode, x.device.type):
        result = norm_cast_kernel.mxnorm_cast(x, estimate, recipe, KERNEL_FORM[mode])
        return Operand(result.data, result.scales), result.rho
    rho = inverse_rms(x, estimate, recipe)
    return quantize(x, recipe, mode, (1,), row_factor=rho)[1], rho


def normalized_codes(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None
) -> tuple[Codes, torch.Tensor]:
    if recipe.format is None:
        operand, rho = normalize(x, estimate, recipe, mode)
        return Codes(operand.data), rho
    if runs_kernels(mode, x.device.type):
        result = norm_cast_kernel.mxnorm_cast(x, estimate, recipe, "codes")
        return Codes(result.data, result.scales), result.rho
    rho = inverse_rms(x, estimate, recipe)
    return Codes(*casts.cast(scale_rows(x, rho), recipe.format, recipe.scale_rounding)), rho


def codes_along_tokens(
    x: torch.Tensor, recipe: Recipe, mode: str, rho: torch.Tensor, signs, group: str | None = None
) -> Codes:
    if recipe.format is None:
        return Codes(activation_along_tokens(x, recipe, mode, rho, signs).data)
    if runs_kernels(mode, x.device.type):
        return Codes(*cast_kernel.cast(x, recipe, (0,), "codes", rho)[0])
    return Codes(*casts.cast(scale_rows(x, rho).t(), recipe.format, recipe.scale_rounding))


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    data, scales, _ = codes
    if recipe.format is not None:
        if mode == "native":
            return Operand(data, casts.to_blocked(scales))
        data = casts.dequantize(data, scales, recipe.format, values_dtype(mode))
    # The memory layout of ``quantize``, because products in another layout may add up in another order.
    return Operand(data if dim == 1 else data.t().contiguous().t())


def quantize(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> dict[int, Operand]:
    """Quantize the matrix ``x`` along each dimension in ``dims``; return the operands by dimension.

    A kernel reads ``x`` once for both dimensions.

    Args:
        x: [R, C], bf16, fp32, or (recipe "unquantized" in mode "reference" only) fp64.
        mode: "native", "emulated" or "reference".
        dims: 1 gives an operand [R, C] that is reduced over C; 0 gives an operand [C, R] that is reduced over R.
            Along dimension 0 the last block may be incomplete.
        row_factor: [R], multiplied in before the cast, in fp32 (fp64 for fp64), without rounding in between.
        column_factor: [C], likewise.
    """
    if recipe.format is not None and runs_kernels(mode, x.device.type):
        form = KERNEL_FORM[mode]
        return _operands(form, cast_kernel.cast(x, recipe, dims, form, row_factor, column_factor))
    if row_factor is not None:
        x = scale_rows(x, row_factor)
    if column_factor is not None:
        x = casts.at_least_fp32(x) * column_factor
    return {dim: _in_pytorch(x, recipe, mode, dim) for dim in dims}


def quantize_joined(
    parts: Sequence[torch.Tensor],
    axis: int,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    column_factor: torch.Tensor | None = None,
) -> dict[int, Operand]:
    """``quantize`` of ``torch.cat(parts, axis)``, for parts of whole blocks. The kernel stores no joined matrix."""
    if not runs_kernels(mode, parts[0].device.type):
        # Every block lies in one part, so its scale does not depend on other parts.
        return quantize(torch.cat(tuple(parts), axis), recipe, mode, dims, column_factor=column_factor)
    form = KERNEL_FORM[mode]
    return _operands(form, joined_cast_kernel.joined_cast(parts, axis, recipe, dims, form, column_factor))


def _operands(form: str, casts_by_dim: Mapping[int, tuple]) -> dict[int, Operand]:
    # The kernel transposes codes because the tensor cores need that. Images only need a transposed view.
    return {
        dim: Operand(data.t() if dim == 0 and form == "image" else data, scales)
        for dim, (data, scales) in casts_by_dim.items()
    }


def _in_pytorch(x: torch.Tensor, recipe: Recipe, mode: str, dim: int) -> Operand:
    if recipe.format is None:
        data = x.to(image_dtype(x, mode))
        return Operand(data if dim == 1 else data.t())
    if mode == "native":
        if dim == 0:
            # The tensor cores take both operands with the reduction axis contiguous, in whole blocks.
            x = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % recipe.block_size))
        codes, scales = casts.cast(x, recipe.format, recipe.scale_rounding)
        return Operand(codes, casts.to_blocked(scales))
    data = casts.image(x, recipe.format, recipe.scale_rounding, dim, image_dtype(x, mode))
    return Operand(data if dim == 1 else data.t())
