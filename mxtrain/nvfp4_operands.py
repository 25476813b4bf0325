"""NVFP4 operands of the three GEMMs: every cast of a matrix to NVFP4 in training is made here.

What each GEMM multiplies (see ``mxtrain.nn.three_gemms``), with the switches of the recipe at their usual values:

    fprop   X along D, to nearest                     W in tiles of 16 x 16, to nearest
    dgrad   dY along N, rounded stochastically        the same W, transposed
    wgrad   dY^T and X^T along the tokens, both Hadamard-transformed along them first; dY rounded stochastically

Operands hold their exact values, tensor scale and all: it is a power of two, so they fit in bf16. It comes from the
largest magnitude of what is cast, after factors and transform, unless it is given.
"""

import torch

from mxtrain.quantize import Operand, image_dtype
from mxtrain.recipe import Recipe
from mxtrain.reference import nvfp4
from mxtrain.reference.casts import at_least_fp32
from mxtrain.reference.hadamard import hadamard, pad, unpack_signs
from mxtrain.reference.philox import rounding_bits
from mxtrain.rounding import Draws


def activation(
    x: torch.Tensor, mode: str, row_factor: torch.Tensor | None = None, tensor_scale: float | None = None
) -> Operand:
    """x [T, D] for fprop: [T, D] in blocks along D; ``row_factor`` [T] is multiplied in first."""
    return _operand(_scaled_rows(x, row_factor), mode, tensor_scale)


def activation_along_tokens(
    x: torch.Tensor, recipe: Recipe, mode: str, row_factor: torch.Tensor | None, signs: torch.Tensor | None
) -> Operand:
    """x [T, D] for wgrad: [D, T rounded up to a multiple of 16] in blocks along T."""
    return _operand(_along_tokens(_scaled_rows(x, row_factor), recipe, signs), mode)


def weight(w: torch.Tensor, recipe: Recipe, mode: str, dim: int, column_factor: torch.Tensor | None = None) -> Operand:
    """w [N, D] for fprop (dim 1: [N, D]) or dgrad (dim 0: [D, N]); ``column_factor`` [D] is multiplied in first."""
    if column_factor is not None:
        w = at_least_fp32(w) * column_factor
    if not recipe.weight_tiles:
        return _operand(w if dim == 1 else w.t(), mode)
    tensor_scale = nvfp4.power_of_two_tensor_scale(w)
    values = nvfp4.dequantize(*nvfp4.cast_tiles(w, tensor_scale), tensor_scale, image_dtype(w, mode))
    return Operand(values if dim == 1 else values.t(), None)


def gradient(
    dy: torch.Tensor,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
) -> dict[int, Operand]:
    """dy [T, N] for dgrad (dim 1: [T, N]) and wgrad (dim 0: [N, T rounded up to a multiple of 16]), by dimension."""
    operands = {}
    if 1 in dims:
        operands[1] = _operand(dy, mode, bits=_bits(*dy.shape, recipe, draws, Draws.DGRAD_KEY))
    if 0 in dims:
        transposed = _along_tokens(dy, recipe, signs)
        columns, rows = transposed.shape
        bits = _bits(rows, columns, recipe, draws, Draws.WGRAD_KEY)
        operands[0] = _operand(transposed, mode, bits=None if bits is None else bits.t())
    return operands


def _operand(
    x: torch.Tensor, mode: str, tensor_scale: float | torch.Tensor | None = None, bits: torch.Tensor | None = None
) -> Operand:
    """x [R, C] cast in blocks along C."""
    if x.numel() == 0:  # no tokens
        return Operand(x.to(image_dtype(x, mode)), None)
    if tensor_scale is None:
        tensor_scale = nvfp4.power_of_two_tensor_scale(x)
    codes, scales = nvfp4.cast(x, tensor_scale, bits)
    return Operand(nvfp4.dequantize(codes, scales, tensor_scale, image_dtype(x, mode)), None)


def _scaled_rows(x: torch.Tensor, factor: torch.Tensor | None) -> torch.Tensor:
    return x if factor is None else at_least_fp32(x) * factor.unsqueeze(1)


def _along_tokens(x: torch.Tensor, recipe: Recipe, signs: torch.Tensor | None) -> torch.Tensor:
    """x [T, C] -> [C, T rounded up to a multiple of 16], Hadamard-transformed if the recipe says so."""
    x = pad(x, 0)
    return (hadamard(x, unpack_signs(signs), 0) if recipe.hadamard else x).t()


def _bits(rows: int, columns: int, recipe: Recipe, draws: torch.Tensor | None, key: int) -> torch.Tensor | None:
    """Random bits [rows, columns] as the layer and the position in training say; None for rounding to nearest."""
    if not recipe.stochastic_rounding:
        return None
    step, microbatch, rank = (draws[i] for i in (Draws.STEP, Draws.MICROBATCH, Draws.RANK))
    return rounding_bits(rows, columns, draws[key], step, rank, microbatch, draws.device)
