"""NVFP4's casts, by kernel or in PyTorch. Each GEMM casts the same matrix differently:

    fprop   X in blocks along D, rounded to nearest               W in tiles of 16 x 16, rounded to nearest
    dgrad   dY in blocks along N, rounded stochastically          the same W, transposed
    wgrad   dY^T and X^T in blocks along tokens, both Hadamard-transformed first; dY rounded stochastically

The recipe can turn off tiles, transform and stochastic rounding. The tensor scale comes from the largest magnitude
that is cast, after factors and transform, and all parts of a matrix on several processes share it. Each expert of a
mixture has one of its own. Only MXNorm's static scale is known beforehand. With tensor_scale = "row", each row of
fprop's X has one of its own; if processes hold parts of rows, they share the scales. Tensor scales are powers of two,
so bf16 and fp32 operands hold their values exactly, tensor scale included.

Operands under four over six have exact tensor scales, amax / (6 * 256). Their bf16 and fp32 values do not contain
these scales: ``FormatOps.matmul`` multiplies the sums by them.
"""

from collections.abc import Sequence

import torch
from torch.nn.functional import ScalingType

from mxtrain.formats.collectives import largest
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import product_of_codes
from mxtrain.formats.hadamard import along_tokens, pad
from mxtrain.formats.hardware import HAS_TRITON, runs_kernels
from mxtrain.formats.matrices import KERNEL_FORM, PLAIN, CastSpec, Codes, Operand, converted, values_dtype
from mxtrain.formats.mx.reference import to_blocked
from mxtrain.formats.mxnorm import inverse_rms
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, NVFP4, TENSOR_SCALE_MIN, reference, static_tensor_scale
from mxtrain.formats.ops import FormatOps
from mxtrain.formats.recipe import Recipe
from mxtrain.rng.philox import rounding_bits, rounding_words, rounding_words_of_rows
from mxtrain.rng.rounding import MAX_ELEMENTS

if HAS_TRITON:
    from mxtrain.formats.nvfp4 import cast as cast_kernel
    from mxtrain.formats.nvfp4 import tensor_scale as scale_kernel
    from mxtrain.formats.nvfp4 import weight_cast as weight_kernel
    from mxtrain.formats.nvfp4.norm import NORM, ROWS, nvfp4_norm, nvfp4_rows

# The tensor cores read 16 bytes at a time along the reduced axis: 32 elements.
NATIVE_MULTIPLE = 32


class NVFP4Ops(FormatOps):
    """What computes with NVFP4. Along dimension 0, operands have the rows of X rounded up to a multiple of 16."""

    if HAS_TRITON:
        casts, norms = (cast_kernel.CAST, ROWS), (NORM,)
        weight_casts = (weight_kernel.CAST,)
        kept = (scale_kernel.TENSOR_SCALES,)

    def cast(self, parts, recipe, mode, dims, spec=PLAIN):
        """Each matrix of ``parts`` has a tensor scale of its own. Several are not for codes or mode "native", whose
        operands have one; nor are ``spec.ends`` and experts, which are for one matrix without ``spec.group``. An input
        whose rows have scales is not cast along both dimensions at once.
        """
        if recipe.tensor_scale == "row" and spec.role == "input" and 1 in dims:
            return {1: _cast_rows(spec.scaled(spec.joined(parts)), recipe, mode, spec)}
        ends = spec.ends
        if spec.experts > 1:
            rows = parts[0].shape[0] // spec.experts
            ends = torch.arange(rows, spec.experts * rows + 1, rows, dtype=torch.int32, device=parts[0].device)
        if spec.source is not None:
            parts = [spec.joined(parts)]
        signs = spec.signs if 0 in dims and spec.is_transformed(recipe) else None
        draws = [bits for bits in spec.draws or () if bits is not None] if recipe.stochastic_rounding else []
        if draws and any(x.numel() > MAX_ELEMENTS for x in parts):
            raise ValueError(f"a gradient has more than the {MAX_ELEMENTS} elements that random bits are drawn for")
        tiles, error = recipe.has_tiles(spec.role), recipe.error_for(spec.role)
        if not runs_kernels(mode, parts[0].device.type):
            results = [
                _in_pytorch(x, mode, dims, spec, signs, of_x, ends, tiles, error)
                for x, of_x in zip(parts, draws or [None] * len(parts))
            ]
            if len(results) == 1:
                return results[0]
            # The operand of dimension 0 is transposed.
            axis = spec.axis
            return {d: Operand(torch.cat([one[d].data for one in results], axis if d else 1 - axis)) for d in dims}
        form = "codes" if spec.as_codes else KERNEL_FORM[mode]
        factors = dict(row_factor=spec.row_factor, column_factor=spec.column_factor)
        if spec.tensor_scale is not None:
            scales = [torch.full((1, 1), spec.tensor_scale, dtype=torch.float32, device=parts[0].device)]
        else:
            # Weights one by one: forward and backward may join them differently, and read each once.
            of = [[x] for x in parts] if tiles else [parts]
            # If processes hold a matrix together, the largest scale of their parts is that of the largest magnitude.
            options = dict(ends=ends, exact=bool(error), **factors)
            scales = [largest(scale_kernel.nvfp4_tensor_scales(some, signs, **options), spec.group) for some in of]
        if tiles:
            casts = weight_kernel.nvfp4_weight(parts, scales, form, spec.column_factor, ends, error)
        else:
            options = dict(signs=signs, draws=draws, axis=spec.axis, ends=ends, error=error, **factors)
            casts = cast_kernel.nvfp4_cast(parts, scales[0], form, dims, **options)
        of_dim = {1: scales[0][:, 0], 0: scales[0][:, -1]}
        if ends is None:
            of_dim = {dim: of_matrix[0] for dim, of_matrix in of_dim.items()}
        elif spec.as_codes:
            of_dim = {1: of_dim[1][_group_of_rows(ends, casts[1].data.shape[0]).clamp(max=ends.shape[0] - 1)]}
        return {dim: _from_kernel(casts[dim], dim, of_dim[dim], form, error) for dim in dims}

    def normalize(self, x, estimate, recipe, mode, group=None, as_codes=False):
        static = self.static_scale(x.shape[-1], estimate, recipe)
        if recipe.tensor_scale != "dynamic" and runs_kernels(mode, x.device.type):
            form, error = "codes" if as_codes else KERNEL_FORM[mode], recipe.error_for("input")
            data, scales, rho, _, tensor_scale = nvfp4_norm(x, estimate, static, form, error=error)
            if static is not None:
                tensor_scale = torch.full((), static, dtype=torch.float32, device=x.device)
            return _from_kernel((data, scales), 1, tensor_scale, form, error), rho
        rho = inverse_rms(x, estimate, recipe)
        if recipe.tensor_scale == "row":
            group = None  # which holds other rows
        spec = CastSpec(row_factor=rho, tensor_scale=static, group=group, as_codes=as_codes)
        return self.cast([x], recipe, mode, (1,), spec)[1], rho

    def encode(self, x: torch.Tensor, recipe: Recipe, mode: str = "reference") -> Codes:
        return self.cast([x], recipe, "reference", (1,), CastSpec("weight", as_codes=True))[1]

    def dequantize(self, codes: Codes, dtype: torch.dtype) -> torch.Tensor:
        return _values(codes, dtype)

    def from_codes(self, codes: Codes, mode: str, dim: int) -> Operand:
        operand = _from_codes(codes, mode)
        if dim == 0 and mode != "native" and runs_kernels(mode, codes.data.device.type):
            # The memory layout of a kernel's values, because products in another layout may add up in another order.
            return operand._replace(data=operand.data.t().contiguous().t())
        return operand

    def product_of_codes(self, a: Operand, b: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        a_data, b_data = (each.data.view(torch.float4_e2m1fn_x2) for each in (a, b))
        if a.tensor_scale.ndim == 0:
            return product_of_codes(a_data, [*a[1:]], b_data, [*b[1:]], kinds, out_dtype)
        # The tensor cores take one scale. As in TransformerEngine, the fp32 product is scaled, then rounded.
        one = torch.ones_like(b.tensor_scale)
        product = product_of_codes(a_data, [a.scales, one], b_data, [b.scales, one], kinds, torch.float32)
        return converted(product * (a.tensor_scale * b.tensor_scale)[:, None], out_dtype)

    def trial(self, x: torch.Tensor) -> Codes:
        return _codes(x, reference.power_of_two_tensor_scale(x), None, False)

    def static_scale(self, columns: int, estimate: RMSEstimate, recipe: Recipe) -> float | None:
        if recipe.tensor_scale != "static":
            return None
        of_estimate = columns, estimate.p, estimate.estimator, estimate.constant
        if recipe.error_for("input"):
            return static_tensor_scale(*of_estimate, FOUR_OVER_SIX_RANGE) * FOUR_OVER_SIX_RANGE
        return static_tensor_scale(*of_estimate)

    def tensor_scales(self, amax: torch.Tensor) -> torch.Tensor:
        return reference.power_of_two_tensor_scales(amax)

    def block_scales(self, amax, recipe, tensor_scale=None):
        scales = reference.block_scales(amax, tensor_scale).float()
        return scales, scales * tensor_scale * NVFP4.element_max

    def stored(self, linear: str, codes: Codes) -> dict[str, torch.Tensor]:
        return {
            f"{linear}.weight_packed": codes.data,
            f"{linear}.weight_scale": codes.scales,
            # A divisor, [1]. The inverse of a power of two is exact, others are rounded.
            f"{linear}.weight_global_scale": codes.scale.reciprocal().reshape(1),
        }

    def with_one_tensor_scale(self, weights: Sequence[Codes]) -> list[Codes] | None:
        """Give weights the largest of their tensor scales, and block scales that leave all values unchanged.

        A block scale shrinks by the power of two by which its tensor scale grows. This is exact unless E4M3 runs out of
        small numbers: training's block scales are at least 2^-6, and E4M3 goes on to 2^-9 with fewer bits.
        """
        tensor_scale = torch.stack([weight.scale for weight in weights]).max().clamp(min=TENSOR_SCALE_MIN)
        changed = []
        for weight in weights:
            wanted = weight.scales.float() * (weight.scale / tensor_scale)
            scales = wanted.to(torch.float8_e4m3fn)
            # A block of zeros may have any scale. Codes of zero differ in their signs only.
            is_zero = (weight.data & 0x77).view(*scales.shape, -1).eq(0).all(-1)
            if not ((scales.float() == wanted) | is_zero).all():
                return None
            changed.append(weight._replace(scales=scales, tensor_scale=tensor_scale, top=None))
        return changed


def _in_pytorch(
    x, mode: str, dims, spec: CastSpec, signs, draws, ends, tiles: bool, error: str
) -> dict[int, Operand | Codes]:
    """Cast one matrix, stochastically if there are draws, or by four over six if there is an ``error``."""
    results = {}
    for dim, (matrix, bits) in _matrices_and_bits(spec.scaled(x), dims, signs, draws, ends).items():
        if spec.tensor_scale is not None:
            scale = torch.full((), spec.tensor_scale, dtype=torch.float32, device=x.device)
        else:
            amax = reference.largest_magnitude(matrix) if ends is None else _amax_of_groups(matrix, dim, ends)
            amax = largest(amax, spec.group)
            scale = amax if error else reference.power_of_two_tensor_scales(amax)
        of_blocks = scale if ends is None else _of_blocks(scale, matrix, dim, ends)
        codes = _codes(matrix, of_blocks, bits, tiles, error)
        if error and ends is not None:
            codes = codes._replace(tensor_scale=of_blocks.squeeze(1) if spec.as_codes else scale[:-1])
        results[dim] = codes if spec.as_codes else _from_codes(codes, mode)
    return results


def _cast_rows(x: torch.Tensor, recipe: Recipe, mode: str, spec: CastSpec) -> Operand | Codes:
    """Cast a matrix along its rows, each of which has a tensor scale of its own."""
    is_kernel, row_scales, error = runs_kernels(mode, x.device.type), None, recipe.error_for("input")
    if spec.group is not None or not is_kernel:
        row_scales = largest(x.abs().amax(1).float(), spec.group)
        row_scales = row_scales if error else reference.power_of_two_tensor_scales(row_scales)
    if is_kernel:
        form = "codes" if spec.as_codes else KERNEL_FORM[mode]
        data, scales, row_scales = nvfp4_rows(x, row_scales, form, error)
        return _from_kernel((data, scales), 1, row_scales, form, error)
    codes = _codes(x, row_scales.unsqueeze(1), None, False, error)._replace(tensor_scale=row_scales)
    return codes if spec.as_codes else _from_codes(codes, mode)


def _matrices_and_bits(
    x: torch.Tensor,
    dims: tuple[int, ...],
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
    ends: torch.Tensor | None,
) -> dict[int, tuple[torch.Tensor, torch.Tensor | None]]:
    """For each dimension the matrix to cast along its rows, and its random bits if there are draws."""
    along = {1: x}
    if 0 in dims:
        along[0] = (pad(x) if signs is None else along_tokens(x, signs)).t()
    if draws is None:
        return {dim: (along[dim], None) for dim in dims}
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
    return {dim: (along[dim], bits[dim]) for dim in dims}


def _operand(data: torch.Tensor, scales: torch.Tensor | None, tensor_scale: torch.Tensor | None) -> Operand:
    """Wrap codes [R, K / 2] with blocked scales (native) or values [R, K] (emulated)."""
    if scales is None:
        return Operand(data, None, tensor_scale)
    # The tensor cores read pairs of blocks: pad an odd number with a block of zeros. Its scale is zero as well,
    # because the blocked layout pads its scales with zeros.
    data = torch.nn.functional.pad(data, (0, -data.shape[1] % (NATIVE_MULTIPLE // 2)))
    return Operand(data.contiguous(), scales, tensor_scale)


def _from_kernel(
    cast: tuple[torch.Tensor, torch.Tensor | None], dim: int, tensor_scale: torch.Tensor | None, form: str, error: str
) -> Operand | Codes:
    """Wrap a kernel's cast along ``dim``. Kernels transpose codes, but not values: those only need a view."""
    codes = Codes(*cast, tensor_scale, FOUR_OVER_SIX_RANGE if error else None)
    if form == "codes":
        return codes
    (data, scales), tensor_scale = cast, None if form == "image" and not error else codes.scale
    return _operand(data.t() if dim == 0 and scales is None else data, scales, tensor_scale)


def _codes(x: torch.Tensor, tensor_scale: torch.Tensor, bits: torch.Tensor | None, tiles: bool, error="") -> Codes:
    """Cast x; by four over six if there is an ``error``, with largest magnitudes in the place of tensor scales."""
    if x.numel() == 0:  # no tokens
        codes = torch.empty(x.shape[0], x.shape[1] // 2, dtype=torch.uint8, device=x.device)
        scales = torch.empty(x.shape[0], x.shape[1] // NVFP4.block_size, dtype=torch.float8_e4m3fn, device=x.device)
    elif error:
        codes, scales = reference.cast_four_over_six(x, tensor_scale, error, tiles)
    else:
        codes, scales = reference.cast(x, tensor_scale, bits, tiles)
    return Codes(codes, scales, tensor_scale, FOUR_OVER_SIX_RANGE if error else None)


def _from_codes(codes: Codes, mode: str) -> Operand:
    if mode == "native":
        return _operand(codes.data, to_blocked(codes.scales), codes.scale)
    if codes.top is not None:
        return Operand(reference.dequantize(codes.data, codes.scales, dtype=values_dtype(mode)), None, codes.scale)
    return Operand(_values(codes, values_dtype(mode)))


def _values(codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    data, scales, tensor_scale, top = codes
    tensor_scale = tensor_scale.unsqueeze(1) if tensor_scale.ndim == 1 else tensor_scale
    if top is not None:
        return reference.dequantize_by_amax(data, scales, tensor_scale, dtype)
    return reference.dequantize(data, scales, tensor_scale, dtype)


def _group_of_rows(ends: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the group of every row, int64 [rows]; the number of groups for rows beyond the last end."""
    return torch.searchsorted(ends, torch.arange(rows, dtype=ends.dtype, device=ends.device), right=True)


def _amax_of_groups(x: torch.Tensor, dim: int, ends: torch.Tensor) -> torch.Tensor:
    """Return the largest magnitude of each group of x = X (dim 1) or X^T (dim 0), and of what is beyond, [G + 1]."""
    groups = _group_of_rows(ends, x.shape[1 - dim])
    # As integers, because they have the order of the magnitudes with NaN as the largest, once its sign is gone.
    maxima = x.abs().amax(dim).float().view(torch.int32) & 0x7FFFFFFF
    return maxima.new_zeros(ends.shape[0] + 1).scatter_reduce(0, groups, maxima, "amax").view(torch.float32)


def _of_blocks(of_groups: torch.Tensor, x: torch.Tensor, dim: int, ends: torch.Tensor) -> torch.Tensor:
    """Return the number of its group [G + 1] for each row of x = X (dim 1), or for each block of x = X^T (dim 0)."""
    found = of_groups[_group_of_rows(ends, x.shape[1 - dim])]
    return found.unsqueeze(1) if dim == 1 else found[:: NVFP4.block_size].unsqueeze(0)
