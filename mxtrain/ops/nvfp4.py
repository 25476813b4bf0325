"""GEMM operands in NVFP4. Each GEMM casts the same matrix differently:

    fprop   X in blocks along D, rounded to nearest               W in tiles of 16 x 16, rounded to nearest
    dgrad   dY in blocks along N, rounded stochastically          the same W, transposed
    wgrad   dY^T and X^T in blocks along tokens, both Hadamard-transformed first; dY rounded stochastically

The recipe can turn off tiles, transform and stochastic rounding. The tensor scale comes from the largest magnitude
that is cast, after factors and transform, and all parts of a matrix on several processes share it; only MXNorm's
static scale is known beforehand. Tensor scales are powers of two, so bf16 and fp32 operands hold their values exactly,
tensor scale included.
"""

from collections.abc import Sequence

import torch

from mxtrain.ops.codes import Codes
from mxtrain.ops.collectives import largest
from mxtrain.ops.gemm import KERNEL_FORM, Operand, image_dtype, values_dtype
from mxtrain.ops.hardware import HAS_TRITON, runs_kernels
from mxtrain.recipes.formats import NVFP4
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import nvfp4 as reference
from mxtrain.reference.casts import at_least_fp32, to_blocked
from mxtrain.reference.hadamard import hadamard, pad, unpack_signs
from mxtrain.reference.mxnorm import inverse_rms, scale_rows
from mxtrain.reference.nvfp4 import power_of_two_tensor_scale
from mxtrain.reference.philox import rounding_bits, rounding_words

if HAS_TRITON:
    from mxtrain.kernels.nvfp4.cast import nvfp4_amax, nvfp4_cast
    from mxtrain.kernels.nvfp4.joined_cast import nvfp4_joined_cast, nvfp4_joined_weight
    from mxtrain.kernels.nvfp4.norm_cast import nvfp4_norm
    from mxtrain.kernels.nvfp4.tensor_scale import nvfp4_tensor_scale
    from mxtrain.kernels.nvfp4.weight_cast import nvfp4_weight

# The tensor cores read 16 bytes at a time along the reduced axis: 32 elements.
NATIVE_MULTIPLE = 32


# One function per role, as in mxtrain.ops.mxfp8; mxtrain.ops.quantize documents them. Along tokens, T is rounded up to
# a multiple of 16.


def activation(x: torch.Tensor, recipe: Recipe, mode: str, group: str | None = None) -> Operand:
    return _activation(x, mode, None, group)


def _activation(x: torch.Tensor, mode: str, rho: torch.Tensor | None, group: str | None) -> Operand:
    """X, or X diag(rho) row by row, as fprop's operand [T, D]."""
    if runs_kernels(mode, x.device.type):
        scale = _scale_of_maxima(nvfp4_amax(x, row_factor=rho)[0], group)
        return _from_kernel(nvfp4_cast(x, {1: scale}, KERNEL_FORM[mode], row_factor=rho)[1], 1, scale, mode)
    x = x if rho is None else scale_rows(x, rho)
    return _in_pytorch(x, mode, _tensor_scale(x, group))


def activation_along_tokens(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    rho: torch.Tensor | None,
    signs: torch.Tensor | None,
    group: str | None = None,
) -> Operand:
    if runs_kernels(mode, x.device.type):
        cast, scale = _cast_along_tokens(x, recipe, KERNEL_FORM[mode], rho, signs, group)
        return _from_kernel(cast, 0, scale, mode)
    x = _along_tokens(x if rho is None else scale_rows(x, rho), recipe, signs)
    return _in_pytorch(x, mode, _tensor_scale(x, group))


def weight(
    w: torch.Tensor, recipe: Recipe, mode: str, dim: int, gain: torch.Tensor | None, group: str | None = None
) -> Operand:
    if runs_kernels(mode, w.device.type):
        return _weight_by_kernels(w, recipe, mode, (dim,), gain, group)[dim]
    if gain is not None:
        w = at_least_fp32(w) * gain
    # The transpose of W has the tiles of W.
    w = w if dim == 1 else w.t()
    return _from_codes(*weight_codes(w, recipe, group), image_dtype(w, mode), mode)


def weight_for_both(
    w: torch.Tensor, recipe: Recipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    if runs_kernels(mode, w.device.type):
        operands = _weight_by_kernels(w, recipe, mode, (1, 0), gain, group)
        return operands[1], operands[0]
    return weight(w, recipe, mode, 1, gain, group), weight(w, recipe, mode, 0, gain, group)


def _weight_by_kernels(
    w: torch.Tensor, recipe: Recipe, mode: str, dims: tuple[int, ...], gain: torch.Tensor | None, group: str | None
) -> dict[int, Operand]:
    form = KERNEL_FORM[mode]
    scale = _scale_of_maxima(nvfp4_amax(w, column_factor=gain)[0], group)
    if not recipe.weight_tiles:
        casts = nvfp4_cast(w, dict.fromkeys(dims, scale), form, column_factor=gain)
    else:
        tiles = nvfp4_weight(w, scale, form, gain)
        # One image serves both orientations.
        casts = {1: tiles[:2], 0: tiles[:2] if form == "image" else tiles[2:]}
    return {dim: _from_kernel(casts[dim], dim, scale, mode) for dim in dims}


def weight_codes(
    w: torch.Tensor, recipe: Recipe, group: str | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Cast W [N, D] (for dgrad: its transpose), gain included, as ``weight`` does in every mode, to codes and scales.

    Returns:
        codes: uint8 [N, D / 2], two per byte.
        scales: float8_e4m3fn [N, D / 16].
        tensor_scale: fp32 [], a power of two.
    """
    scale = _tensor_scale(w, group)
    cast = reference.cast_tiles if recipe.weight_tiles else reference.cast
    return *cast(w, scale), scale


def gradient(
    dy: torch.Tensor,
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    group: str | None = None,
) -> dict[int, Operand]:
    if runs_kernels(mode, dy.device.type):
        signs = signs if recipe.hadamard and 0 in dims else None
        draws = draws if recipe.stochastic_rounding else None
        scales = _tensor_scales_of_gradient(dy, dims, signs, group)
        results = nvfp4_cast(dy, scales, KERNEL_FORM[mode], signs=signs, draws=draws)
        return {dim: _from_kernel(cast, dim, scales[dim], mode) for dim, cast in results.items()}
    transposed = _along_tokens(dy, recipe, signs) if 0 in dims else None
    rows, columns = dy.shape if transposed is None else transposed.t().shape  # padding adds rows
    words = _words(rows, columns, recipe, draws)
    operands = {}
    if 1 in dims:
        # len(dy) would give a compiled graph one number of tokens.
        bits = None if words is None else rounding_bits(words[: dy.shape[0]], 1)
        operands[1] = _in_pytorch(dy, mode, _tensor_scale(dy, group), bits)
    if 0 in dims:
        bits = None if words is None else rounding_bits(words, 0).t()
        operands[0] = _in_pytorch(transposed, mode, _tensor_scale(transposed, group), bits)
    return operands


def _tensor_scales_of_gradient(
    dy: torch.Tensor, dims: tuple[int, ...], signs: torch.Tensor | None, group: str | None
) -> dict[int, torch.Tensor]:
    """Return the tensor scale for a cast along each dimension: of dY along N, of the transformed dY along tokens."""
    amax, transformed = nvfp4_amax(dy, signs)
    maxima = {1: amax, 0: amax if signs is None else transformed}
    return {dim: _scale_of_maxima(maxima[dim], group) for dim in dims}


def weights(
    ws: Sequence[torch.Tensor], recipe: Recipe, mode: str, dim: int, gain: torch.Tensor | None, group: str | None = None
) -> Operand:
    return _weights(ws, recipe, mode, (dim,), gain, group)[dim]


def weights_for_both(
    ws: Sequence[torch.Tensor], recipe: Recipe, mode: str, gain: torch.Tensor | None, group: str | None = None
) -> tuple[Operand, Operand]:
    operands = _weights(ws, recipe, mode, (1, 0), gain, group)
    return operands[1], operands[0]


def _weights(
    ws: Sequence[torch.Tensor],
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    gain: torch.Tensor | None,
    group: str | None,
) -> dict[int, Operand]:
    if not runs_kernels(mode, ws[0].device.type):
        return {
            dim: Operand(torch.cat([weight(w, recipe, mode, dim, gain, group).data for w in ws], 1 - dim))
            for dim in dims
        }
    scales = [_scale_of_maxima(nvfp4_amax(w, column_factor=gain)[0], group) for w in ws]
    if recipe.weight_tiles:
        # One image serves both orientations.
        images = dict.fromkeys(dims, nvfp4_joined_weight(ws, scales, gain))
    else:
        images = nvfp4_joined_cast(ws, 0, dict.fromkeys(dims, scales), column_factor=gain)
    return {dim: Operand(images[dim] if dim == 1 else images[dim].t()) for dim in dims}


def gradients(
    dys: Sequence[torch.Tensor],
    recipe: Recipe,
    mode: str,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: Sequence[torch.Tensor | None],
    group: str | None = None,
) -> dict[int, Operand]:
    if not runs_kernels(mode, dys[0].device.type):
        parts = [gradient(dy, recipe, mode, dims, signs, of_dy, group) for dy, of_dy in zip(dys, draws)]
        return {dim: Operand(torch.cat([part[dim].data for part in parts], dim)) for dim in dims}
    signs = signs if recipe.hadamard and 0 in dims else None
    by_dy = [_tensor_scales_of_gradient(dy, dims, signs, group) for dy in dys]
    scales = {dim: [of_dy[dim] for of_dy in by_dy] for dim in dims}
    draws = draws if recipe.stochastic_rounding else None
    images = nvfp4_joined_cast(dys, 1, scales, signs=signs, draws=draws)
    return {dim: Operand(image if dim == 1 else image.t()) for dim, image in images.items()}


def normalize(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str) -> tuple[Operand, torch.Tensor]:
    static = _static_tensor_scale(x, estimate, recipe)
    if static is None:
        rho = inverse_rms(x, estimate, recipe)
        return _activation(x, mode, rho, None), rho
    tensor_scale = torch.full((), static, dtype=torch.float32, device=x.device)
    if runs_kernels(mode, x.device.type):
        result = nvfp4_norm(x, estimate, static, KERNEL_FORM[mode])
        return _operand(result.data, result.scales, tensor_scale, mode), result.rho
    rho = inverse_rms(x, estimate, recipe)
    return _in_pytorch(scale_rows(x, rho), mode, tensor_scale), rho


def normalized_codes(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str, group: str | None = None
) -> tuple[Codes, torch.Tensor]:
    kernels = runs_kernels(mode, x.device.type)
    static = _static_tensor_scale(x, estimate, recipe)
    if static is not None:
        tensor_scale = torch.full((), static, dtype=torch.float32, device=x.device)
        if kernels:
            result = nvfp4_norm(x, estimate, static, "codes")
            return Codes(result.data, result.scales, tensor_scale), result.rho
    rho = inverse_rms(x, estimate, recipe)
    if kernels:
        tensor_scale = _scale_of_maxima(nvfp4_amax(x, row_factor=rho)[0], group)
        cast = nvfp4_cast(x, {1: tensor_scale}, "codes", row_factor=rho)[1]
        return Codes(*cast, tensor_scale), rho
    xhat = scale_rows(x, rho)
    if static is None:
        tensor_scale = _tensor_scale(xhat, group)
    return Codes(*reference.cast(xhat, tensor_scale), tensor_scale), rho


def codes_along_tokens(
    x: torch.Tensor,
    recipe: Recipe,
    mode: str,
    rho: torch.Tensor,
    signs: torch.Tensor | None,
    group: str | None = None,
) -> Codes:
    if runs_kernels(mode, x.device.type):
        cast, tensor_scale = _cast_along_tokens(x, recipe, "codes", rho, signs, group)
        return Codes(*cast, tensor_scale)
    x = _along_tokens(scale_rows(x, rho), recipe, signs)
    tensor_scale = _tensor_scale(x, group)
    return Codes(*reference.cast(x, tensor_scale), tensor_scale)


def from_codes(codes: Codes, recipe: Recipe, mode: str, dim: int) -> Operand:
    operand = _from_codes(*codes, values_dtype(mode), mode)
    if dim == 0 and mode != "native" and runs_kernels(mode, codes.data.device.type):
        # The memory layout of a kernel's values, because products in another layout may add up in another order.
        return Operand(operand.data.t().contiguous().t())
    return operand


def _cast_along_tokens(x: torch.Tensor, recipe: Recipe, form: str, rho, signs, group: str | None):
    """Cast X [T, D], row t times rho[t], in blocks along tokens; return the kernel's result and the tensor scale."""
    signs = signs if recipe.hadamard else None
    amax, transformed = nvfp4_amax(x, signs, rho)
    scale = _scale_of_maxima(amax if signs is None else transformed, group)
    return nvfp4_cast(x, {0: scale}, form, signs=signs, row_factor=rho)[0], scale


def _static_tensor_scale(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe) -> float | None:
    """Return the tensor scale that bounds x * rho; None for a recipe that takes the scale from the values."""
    if recipe.tensor_scale == "dynamic":
        return None
    return reference.static_tensor_scale(x.shape[-1], estimate.p, estimate.estimator, estimate.constant)


def _operand(data: torch.Tensor, scales: torch.Tensor | None, tensor_scale: torch.Tensor, mode: str) -> Operand:
    """Wrap codes [R, K / 2] with blocked scales (native) or values [R, K] (emulated)."""
    if mode != "native":
        return Operand(data)
    # The tensor cores read pairs of blocks: pad an odd number with a block of zeros. Its scale is zero as well,
    # because the blocked layout pads its scales with zeros.
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % (NATIVE_MULTIPLE // 2)))
    return Operand(data.contiguous(), scales, tensor_scale)


def _from_kernel(
    cast: tuple[torch.Tensor, torch.Tensor | None], dim: int, tensor_scale: torch.Tensor, mode: str
) -> Operand:
    """Wrap a kernel's cast along ``dim``. Kernels transpose codes, but not values: those only need a view."""
    data, scales = cast
    return _operand(data.t() if dim == 0 and scales is None else data, scales, tensor_scale, mode)


def _in_pytorch(x: torch.Tensor, mode: str, tensor_scale: torch.Tensor, bits: torch.Tensor | None = None) -> Operand:
    """Cast x [R, C] in blocks along C; stochastically with ``bits``."""
    if x.numel() == 0:  # no tokens
        codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(x.shape[0], x.shape[1] // NVFP4.block_size, dtype=torch.float8_e4m3fn, device=x.device)
    else:
        codes, scales = reference.cast(x, tensor_scale, bits)
    return _from_codes(codes, scales, tensor_scale, image_dtype(x, mode), mode)


def _from_codes(
    codes: torch.Tensor, scales: torch.Tensor, tensor_scale: torch.Tensor, dtype: torch.dtype, mode: str
) -> Operand:
    if mode == "native":
        return _operand(codes, to_blocked(scales), tensor_scale, mode)
    return Operand(reference.dequantize(codes, scales, tensor_scale, dtype))


def _tensor_scale(x: torch.Tensor, group: str | None) -> torch.Tensor:
    """Return the tensor scale of a matrix, fp32 []; ``group`` holds its parts."""
    return power_of_two_tensor_scale(x if group is None else _largest(x.abs(), group))


def _scale_of_maxima(maxima: torch.Tensor, group: str | None) -> torch.Tensor:
    """Return the tensor scale of a matrix whose maxima a kernel found, fp32 []; ``group`` holds its parts."""
    return nvfp4_tensor_scale(maxima if group is None else _largest(maxima, group))


def _largest(magnitudes: torch.Tensor, group: str) -> torch.Tensor:
    return largest(magnitudes.amax() if magnitudes.numel() else magnitudes.new_zeros(()), group)


def _along_tokens(x: torch.Tensor, recipe: Recipe, signs: torch.Tensor | None) -> torch.Tensor:
    """x [T, C] -> [C, T rounded up to a multiple of 16], Hadamard-transformed if the recipe says so."""
    x = pad(x, 0)
    return (hadamard(x, unpack_signs(signs), 0) if recipe.hadamard else x).t()


def _words(rows: int, columns: int, recipe: Recipe, draws: torch.Tensor | None) -> torch.Tensor | None:
    """Derive random words [rows, columns] from ``draws`` (``Draws``); None if the recipe rounds to nearest."""
    if not recipe.stochastic_rounding:
        return None
    key, step, microbatch, rank = draws.unbind()
    return rounding_words(rows, columns, key, step, rank, microbatch, draws.device)
