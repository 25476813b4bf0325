"""NVFP4 operands of the three GEMMs: every cast of a matrix to NVFP4 in training is made here, by kernel or in PyTorch.

What each GEMM multiplies (see ``mxtrain.nn.three_gemms``), with the switches of the recipe at their usual values:

    fprop   X along D, to nearest                     W in tiles of 16 x 16, to nearest
    dgrad   dY along N, rounded stochastically        the same W, transposed
    wgrad   dY^T and X^T along the tokens, both Hadamard-transformed along them first; dY rounded stochastically

The tensor scale comes from the largest magnitude of what is cast, after factors and transform, unless it is given. It
is a power of two, so that operands that hold values hold them exactly, tensor scale and all.
"""

import torch

from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.ops.quantize import KERNEL_FORM, Operand, image_dtype
from mxtrain.recipes.formats import NVFP4
from mxtrain.recipes.recipe import Recipe
from mxtrain.reference import nvfp4
from mxtrain.reference.casts import at_least_fp32, to_blocked
from mxtrain.reference.hadamard import hadamard, pad, unpack_signs
from mxtrain.reference.philox import rounding_bits, rounding_words

if HAS_TRITON:
    from mxtrain.kernels.nvfp4.cast import nvfp4_amax, nvfp4_cast
    from mxtrain.kernels.nvfp4.weight_cast import nvfp4_weight

# What the tensor cores take at once along the axis that is reduced: 16 bytes.
NATIVE_MULTIPLE = 32


def activation(
    x: torch.Tensor, mode: str, row_factor: torch.Tensor | None = None, tensor_scale: float | None = None
) -> Operand:
    """x [T, D] for fprop: [T, D] in blocks along D; ``row_factor`` [T] is multiplied in first."""
    if runs_kernels(mode, x.device.type):
        if tensor_scale is None:
            scale = nvfp4.power_of_two_tensor_scale(nvfp4_amax(x, row_factor=row_factor)[0])
        else:
            scale = torch.full((), tensor_scale, device=x.device)
        return _from_kernel(nvfp4_cast(x, {1: scale}, KERNEL_FORM[mode], row_factor=row_factor)[1], 1, scale, mode)
    return _operand(_scaled_rows(x, row_factor), mode, tensor_scale)


def activation_along_tokens(
    x: torch.Tensor, recipe: Recipe, mode: str, row_factor: torch.Tensor | None, signs: torch.Tensor | None
) -> Operand:
    """x [T, D] for wgrad: [D, T rounded up to a multiple of 16] in blocks along T."""
    if runs_kernels(mode, x.device.type):
        signs = signs if recipe.hadamard else None
        amax, transformed = nvfp4_amax(x, signs, row_factor)
        scale = nvfp4.power_of_two_tensor_scale(amax if signs is None else transformed)
        results = nvfp4_cast(x, {0: scale}, KERNEL_FORM[mode], signs=signs, row_factor=row_factor)
        return _from_kernel(results[0], 0, scale, mode)
    return _operand(_along_tokens(_scaled_rows(x, row_factor), recipe, signs), mode)


def weight(w: torch.Tensor, recipe: Recipe, mode: str, dim: int, column_factor: torch.Tensor | None = None) -> Operand:
    """w [N, D] for fprop (dim 1: [N, D]) or dgrad (dim 0: [D, N]); ``column_factor`` [D] is multiplied in first."""
    if runs_kernels(mode, w.device.type):
        form = KERNEL_FORM[mode]
        scale = nvfp4.power_of_two_tensor_scale(nvfp4_amax(w, column_factor=column_factor)[0])
        if not recipe.weight_tiles:
            cast = nvfp4_cast(w, {dim: scale}, form, column_factor=column_factor)[dim]
        else:
            tiles = nvfp4_weight(w, scale, form, column_factor)
            # One image serves both orientations.
            cast = tiles[:2] if dim == 1 or form == "image" else tiles[2:]
        return _from_kernel(cast, dim, scale, mode)
    if column_factor is not None:
        w = at_least_fp32(w) * column_factor
    if not recipe.weight_tiles:
        return _operand(w if dim == 1 else w.t(), mode)
    scale = nvfp4.power_of_two_tensor_scale(w)
    # The tiles of the transpose are those of w.
    return _from_codes(*nvfp4.cast_tiles(w if dim == 1 else w.t(), scale), scale, image_dtype(w, mode), mode)


def gradient(
    dy: torch.Tensor,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
) -> dict[int, Operand]:
    """dy [T, N] for dgrad (dim 1: [T, N]) and wgrad (dim 0: [N, T rounded up to a multiple of 16]), by dimension."""
    if runs_kernels(mode, dy.device.type):
        return _gradient_by_kernel(dy, recipe, mode, dims, signs, draws)
    operands = {}
    if 1 in dims:
        operands[1] = _operand(dy, mode, bits=_bits(*dy.shape, 1, recipe, draws))
    if 0 in dims:
        transposed = _along_tokens(dy, recipe, signs)
        columns, rows = transposed.shape
        bits = _bits(rows, columns, 0, recipe, draws)
        operands[0] = _operand(transposed, mode, bits=None if bits is None else bits.t())
    return operands


def _gradient_by_kernel(
    dy: torch.Tensor,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
) -> dict[int, Operand]:
    signs = signs if recipe.hadamard and 0 in dims else None
    amax, transformed = nvfp4_amax(dy, signs)
    scale = nvfp4.power_of_two_tensor_scale(amax)
    scales = {dim: scale if dim == 1 or signs is None else nvfp4.power_of_two_tensor_scale(transformed) for dim in dims}
    draws = draws if recipe.stochastic_rounding else None
    results = nvfp4_cast(dy, scales, KERNEL_FORM[mode], signs=signs, draws=draws)
    return {dim: _from_kernel(cast, dim, scales[dim], mode) for dim, cast in results.items()}


def operand_of(data: torch.Tensor, scales: torch.Tensor | None, tensor_scale: torch.Tensor, mode: str) -> Operand:
    """What a kernel made of a matrix in the form of ``mode``, codes [R, K / 2] or values [R, K], as an operand."""
    if mode != "native":
        return Operand(data)
    # A block of zeros more, where half of what the tensor cores take would be missing; its scale is zero, too: the
    # blocked layout is filled up with them.
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % (NATIVE_MULTIPLE // 2)))
    return Operand(data.contiguous(), scales, tensor_scale)


def _from_kernel(
    cast: tuple[torch.Tensor, torch.Tensor | None], dim: int, tensor_scale: torch.Tensor, mode: str
) -> Operand:
    """A cast along ``dim``. Kernels transpose codes, which the tensor cores need, but not values: a view does."""
    data, scales = cast
    return operand_of(data.t() if dim == 0 and scales is None else data, scales, tensor_scale, mode)


def _operand(
    x: torch.Tensor, mode: str, tensor_scale: float | torch.Tensor | None = None, bits: torch.Tensor | None = None
) -> Operand:
    """x [R, C] cast in blocks along C."""
    if tensor_scale is None:
        tensor_scale = nvfp4.power_of_two_tensor_scale(x)
    elif not isinstance(tensor_scale, torch.Tensor):
        tensor_scale = torch.full((), tensor_scale, device=x.device)
    if x.numel() == 0:  # no tokens
        codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(x.shape[0], x.shape[1] // NVFP4.block_size, dtype=torch.float8_e4m3fn, device=x.device)
    else:
        codes, scales = nvfp4.cast(x, tensor_scale, bits)
    return _from_codes(codes, scales, tensor_scale, image_dtype(x, mode), mode)


def _from_codes(
    codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor, dtype: torch.dtype, mode: str
) -> Operand:
    if mode == "native":
        return operand_of(codes, to_blocked(scales), tensor_scale, mode)
    return Operand(nvfp4.dequantize(codes, scales, tensor_scale, dtype))


def _scaled_rows(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else at_least_fp32(x) * factor.unsqueeze(1)


def _along_tokens(x: torch.Tensor, recipe: Recipe, signs: torch.Tensor | None) -> torch.Tensor:
    """x [T, C] -> [C, T rounded up to a multiple of 16], Hadamard-transformed if the recipe says so."""
    x = pad(x, 0)
    return (hadamard(x, unpack_signs(signs), 0) if recipe.hadamard else x).t()


def _bits(rows: int, columns: int, dim: int, recipe: Recipe, draws: torch.Tensor | None) -> torch.Tensor | None:
    """Random bits [rows, columns] that follow from ``draws`` (``Draws``); None to round to nearest."""
    if not recipe.stochastic_rounding:
        return None
    key, step, microbatch, rank = draws.unbind()
    return rounding_bits(rounding_words(rows, columns, key, step, rank, microbatch, draws.device), dim)
