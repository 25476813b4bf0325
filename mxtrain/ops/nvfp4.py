"""NVFP4's casts for ``mxtrain.ops.quantize``, by kernel or in PyTorch. Each GEMM casts the same matrix differently:

    fprop   X in blocks along D, rounded to nearest               W in tiles of 16 x 16, rounded to nearest
    dgrad   dY in blocks along N, rounded stochastically          the same W, transposed
    wgrad   dY^T and X^T in blocks along tokens, both Hadamard-transformed first; dY rounded stochastically

The recipe can turn off tiles, transform and stochastic rounding. The tensor scale comes from the largest magnitude
that is cast, after factors and transform, and all parts of a matrix on several processes share it. Each expert of a
mixture has one of its own. Only MXNorm's static scale is known beforehand. Tensor scales are powers of two, so bf16 and
fp32 operands hold their values exactly, tensor scale included.
"""

from collections.abc import Sequence

import torch

from mxtrain.ops.collectives import largest
from mxtrain.ops.gemm import KERNEL_FORM, Codes, Operand, image_dtype, values_dtype
from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.recipes.formats import NVFP4
from mxtrain.recipes.recipe import Recipe, RMSEstimate
from mxtrain.reference import nvfp4 as reference
from mxtrain.reference.casts import at_least_fp32, rows_in_order, to_blocked
from mxtrain.reference.hadamard import hadamard, pad, unpack_signs
from mxtrain.reference.mxnorm import inverse_rms, scale_rows
from mxtrain.reference.philox import rounding_bits, rounding_words, rounding_words_of_rows
from mxtrain.rng.rounding import MAX_ELEMENTS

if HAS_TRITON:
    from mxtrain.kernels.mxnorm import nvfp4_norm
    from mxtrain.kernels.nvfp4.cast import nvfp4_cast
    from mxtrain.kernels.nvfp4.tensor_scale import nvfp4_tensor_scales
    from mxtrain.kernels.nvfp4.weight_cast import nvfp4_weight

# The tensor cores read 16 bytes at a time along the reduced axis: 32 elements.
NATIVE_MULTIPLE = 32


def cast(
    parts: Sequence[torch.Tensor],
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    *,
    axis: int = 0,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    is_weight: bool = False,
    signs: torch.Tensor | None = None,
    draws: Sequence[torch.Tensor | None] | None = None,
    tensor_scale: torch.Tensor | None = None,
    group: str | None = None,
    as_codes: bool = False,
    source: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    experts: int = 1,
) -> dict[int, Operand | Codes]:
    """Quantize a matrix X [R, C] along each dimension in ``dims``; return the operands by dimension.

    The other arguments are those of ``mxtrain.ops.mxfp8.cast``. Along dimension 0, R is rounded up to a multiple of 16.

    Args:
        parts: X, or several matrices for one operand, each of which has a tensor scale of its own. Not for codes or
            mode "native", whose operands have one tensor scale.
        is_weight: cast in tiles of 16 x 16, if the recipe has them, and without a transform.
        signs: packed signs of the Hadamard transform along dimension 0, int64 []; None if the recipe has none.
        draws: for each part what its random bits come from (``Draws``); None, or a recipe that rounds to nearest:
            round to nearest.
        tensor_scale: fp32 [], a power of two; None takes it from the largest magnitude.
        group: name of the process group that holds X together; None for a whole X.
        ends: int32 [G], multiples of 16, the ends of groups of rows of X. Each group is cast as a matrix of its own, of
            which the draws are int64 [4]: ``draws`` has one tensor [G, 4]. Rows beyond the last end: any values. For
            one matrix without group, and not as codes or in mode "native".
        experts: X is so many groups of equal height.
    """
    if experts > 1:
        rows = parts[0].shape[0] // experts
        ends = torch.arange(rows, experts * rows + 1, rows, dtype=torch.int32, device=parts[0].device)
    if source is not None:
        parts = [rows_in_order(parts[0], source)]
    signs = signs if recipe.hadamard and 0 in dims and not is_weight else None
    draws = [bits for bits in draws or () if bits is not None] if recipe.stochastic_rounding else []
    if draws and any(x.numel() > MAX_ELEMENTS for x in parts):
        raise ValueError(f"a gradient has more than the {MAX_ELEMENTS} elements that random bits are drawn for")
    tiles = is_weight and recipe.weight_tiles
    factors = dict(row_factor=row_factor, column_factor=column_factor)
    if not runs_kernels(mode, parts[0].device.type):
        results = [
            {
                dim: _in_pytorch(
                    matrix,
                    mode,
                    tensor_scale if ends is None else _scales_of_groups(matrix, dim, ends),
                    group,
                    bits,
                    tiles,
                    as_codes,
                )
                for dim, (matrix, bits) in _matrices_and_bits(x, dims, signs, of_x, ends, **factors).items()
            }
            for x, of_x in zip(parts, draws or [None] * len(parts))
        ]
        if len(results) == 1:
            return results[0]
        # The operand of dimension 0 is transposed.
        return {dim: Operand(torch.cat([one[dim].data for one in results], axis if dim else 1 - axis)) for dim in dims}
    form = "codes" if as_codes else KERNEL_FORM[mode]
    if tensor_scale is not None:
        scales = [tensor_scale.view(1, 1)]
    else:
        # Weights one by one: forward and backward may join them differently, and read each once.
        of = [[x] for x in parts] if tiles else [parts]
        # If processes hold a matrix together, the largest scale of their parts is that of the largest magnitude.
        scales = [largest(nvfp4_tensor_scales(some, signs, ends=ends, **factors), group) for some in of]
    if tiles:
        casts = nvfp4_weight(parts, scales, form, column_factor, ends)
    else:
        casts = nvfp4_cast(parts, scales[0], form, dims, signs=signs, draws=draws, axis=axis, ends=ends, **factors)
    return {dim: _from_kernel(casts[dim], dim, scales[0], mode, form) for dim in dims}


def _matrices_and_bits(
    x: torch.Tensor,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    ends: torch.Tensor | None,
    row_factor: torch.Tensor | None,
    column_factor: torch.Tensor | None,
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """For each dimension the matrix to cast along its rows, and its random bits if there are draws."""
    x = x if row_factor is None else scale_rows(x, row_factor)
    x = x if column_factor is None else at_least_fp32(x) * column_factor
    along = {dim: x if dim == 1 else _along_tokens(x, signs) for dim in dims}
    if draws is None:
        return {dim: (matrix, None) for dim, matrix in along.items()}
    # Padding adds rows. len(x) would give a compiled graph one number of tokens.
    rows, columns = along[0].t().shape if 0 in dims else x.shape
    if ends is None:
        key, step, microbatch, rank = draws.unbind()
        words = rounding_words(rows, columns, key, step, rank, microbatch, draws.device)
    else:
        groups = _group_of_rows(ends, rows).clamp(max=ends.shape[0] - 1)
        row = torch.arange(rows, device=ends.device) - torch.nn.functional.pad(ends[:-1], (1, 0))[groups]
        key, step, microbatch, rank = draws[groups].unbind(1)
        words = rounding_words_of_rows(row, columns, key, step, rank, microbatch)
    bits = {1: rounding_bits(words[: x.shape[0]], 1), 0: rounding_bits(words, 0).t()}
    return {dim: (matrix, bits[dim]) for dim, matrix in along.items()}


def normalize(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None, as_codes: bool = False
) -> tuple[Operand | Codes, torch.Tensor]:
    """See ``mxtrain.ops.quantize``; likewise the functions below."""
    tensor_scale = None
    if recipe.tensor_scale == "static":
        static = reference.static_tensor_scale(x.shape[-1], estimate.p, estimate.estimator, estimate.constant)
        tensor_scale = torch.full((), static, dtype=torch.float32, device=x.device)
        if runs_kernels(mode, x.device.type):
            form = "codes" if as_codes else KERNEL_FORM[mode]
            data, scales, rho, _ = nvfp4_norm(x, estimate, static, form)
            return _from_kernel((data, scales), 1, tensor_scale, mode, form), rho
    rho = inverse_rms(x, estimate, recipe)
    settings = dict(row_factor=rho, tensor_scale=tensor_scale, group=group, as_codes=as_codes)
    return cast([x], recipe, mode, (1,), **settings)[1], rho


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    operand = _from_codes(*codes, values_dtype(mode), mode)
    if dim == 0 and mode != "native" and runs_kernels(mode, codes.data.device.type):
        # The memory layout of a kernel's values, because products in another layout may add up in another order.
        return Operand(operand.data.t().contiguous().t())
    return operand


def weight_codes(w: torch.Tensor, recipe: Recipe) -> Codes:
    """Cast W [N, D], gain included, as for fprop in every mode: uint8 [N, D / 2] and float8_e4m3fn [N, D / 16]."""
    return _codes(w, _tensor_scale(w, None), None, recipe.weight_tiles)


def _operand(data: torch.Tensor, scales: torch.Tensor | None, tensor_scale: torch.Tensor | None, mode: str) -> Operand:
    """Wrap codes [R, K / 2] with blocked scales (native) or values [R, K] (emulated)."""
    if mode != "native":
        return Operand(data)
    # The tensor cores read pairs of blocks: pad an odd number with a block of zeros. Its scale is zero as well,
    # because the blocked layout pads its scales with zeros.
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % (NATIVE_MULTIPLE // 2)))
    return Operand(data.contiguous(), scales, tensor_scale)


def _from_kernel(
    cast: tuple[torch.Tensor, torch.Tensor | None], dim: int, tensor_scales: torch.Tensor, mode: str, form: str
) -> Operand | Codes:
    """Wrap a kernel's cast along ``dim``. Kernels transpose codes, but not values: those only need a view."""
    data, scales = cast
    tensor_scale = None if form == "image" else tensor_scales.view(-1)[0 if dim == 1 else -1]
    if form == "codes":
        return Codes(data, scales, tensor_scale)
    return _operand(data.t() if dim == 0 and scales is None else data, scales, tensor_scale, mode)


def _in_pytorch(
    x: torch.Tensor,
    mode: str,
    tensor_scale: torch.Tensor | None,
    group: str | None,
    bits: torch.Tensor | None,
    tiles: bool,
    as_codes: bool,
) -> Operand | Codes:
    """Cast x [R, C] in blocks along C; stochastically with ``bits``."""
    tensor_scale = _tensor_scale(x, group) if tensor_scale is None else tensor_scale
    codes = _codes(x, tensor_scale, bits, tiles)
    return codes if as_codes else _from_codes(*codes, image_dtype(x, mode), mode)


def _codes(x: torch.Tensor, tensor_scale: torch.Tensor, bits: torch.Tensor | None, tiles: bool) -> Codes:
    if x.numel() == 0:  # no tokens
        codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(x.shape[0], x.shape[1] // NVFP4.block_size, dtype=torch.float8_e4m3fn, device=x.device)
    elif tiles:
        codes, scales = reference.cast_tiles(x, tensor_scale)
    else:
        codes, scales = reference.cast(x, tensor_scale, bits)
    return Codes(codes, scales, tensor_scale)


def _from_codes(
    codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor, dtype: torch.dtype, mode: str
) -> Operand:
    if mode == "native":
        return _operand(codes, to_blocked(scales), tensor_scale, mode)
    return Operand(reference.dequantize(codes, scales, tensor_scale, dtype))


def _tensor_scale(x: torch.Tensor, group: str | None) -> torch.Tensor:
    """Return the tensor scale of a matrix, fp32 []; ``group`` holds its parts."""
    return largest(reference.power_of_two_tensor_scale(x), group)


def _group_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the group of every row, int64 [rows]; the number of groups for rows beyond the last end."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def _scales_of_groups(x: torch.Tensor, dim: int, ends: torch.Tensor) -> torch.Tensor:
    """Return the tensor scale of its group for each row of x = X (dim 1), or for each block of x = X^T (dim 0)."""
    groups = _group_of_rows(ends, x.shape[1 - dim])
    # As integers, because they have the order of the magnitudes with NaN as the largest, once its sign is gone.
    maxima = x.abs().amax(dim).float().view(torch.int32) & 0x7FFFFFFF
    largest_of = maxima.new_zeros(ends.shape[0] + 1).scatter_reduce(0, groups, maxima, "amax")
    scales = reference.power_of_two_tensor_scales(largest_of.view(torch.float32))[groups]
    return scales.unsqueeze(1) if dim == 1 else scales[:: NVFP4.block_size].unsqueeze(0)


def _along_tokens(x: torch.Tensor, signs: torch.Tensor | None) -> torch.Tensor:
    """x [T, C] -> [C, T rounded up to a multiple of 16], Hadamard-transformed if there are signs."""
    x = pad(x, 0)
    return (x if signs is None else hadamard(x, unpack_signs(signs), 0)).t()
