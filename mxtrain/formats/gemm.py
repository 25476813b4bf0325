"""Products of operands, of matrices and of stacked experts, with fp32 sums, whatever PyTorch is set to.

PyTorch lets cuBLAS round fp32 operands to TF32, add up partial sums in bf16 or fp16 where it splits a product, and sum
all products of fp16 operands in fp16. On a CPU that multiplies bf16 itself, it lets oneDNN round fp32 operands to bf16
(``torch.set_float32_matmul_precision("medium")``).
"""

import contextlib
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch.nn.functional import ScalingType, SwizzleType, grouped_mm, scaled_grouped_mm, scaled_mm

from mxtrain.formats.matrices import Operand, converted, scale_of_product
from mxtrain.formats.recipe import LONGEST_BLOCK
from mxtrain.launch.functions import define_op


def matmul(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Multiply a [M, K] by the transpose of b [N, K] -> [M, N], summed in fp32 and rounded once, to ``out_dtype``.

    With ``scale``, fp32 [] or [M], the sums are multiplied by it before that.
    """
    # b may be bf16 values that an fp32 gradient multiplies.
    # Autocast would round the fp32 operands of the reference mode to bf16.
    with torch.autocast(device_type=a.device.type, enabled=False):
        b = converted(b, a.dtype).t()
        # A plain torch.mm wherever it is right: TorchTitan's own selective activation checkpointing knows no other
        # product. Where the result is converted, one op does both, so that checkpointing keeps the result, not the
        # larger product.
        if scale is None and out_dtype == a.dtype and is_full_precision(a.dtype, a.is_cuda):
            return torch.mm(a, b)
        return guarded_mm(a, b, out_dtype, scale)


def product_of_codes(
    a: torch.Tensor, a_scales: list, b: torch.Tensor, b_scales: list, kinds: list[ScalingType], out_dtype: torch.dtype
) -> torch.Tensor:
    """``matmul`` on the MX tensor cores: of codes with block scales in the 128x4 layout, then a tensor scale if any."""
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][: len(kinds)]
    of_a = {"scale_a": a_scales, "scale_recipe_a": kinds, "swizzle_a": swizzle}
    of_b = {"scale_b": b_scales, "scale_recipe_b": kinds, "swizzle_b": swizzle}
    return scaled_mm(a, b.t(), **of_a, **of_b, output_dtype=out_dtype)


def _guarded_mm(
    a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, scale: torch.Tensor | None = None
) -> torch.Tensor:
    if scale is not None:
        return converted(wide_product(torch.mm, a, b).mul_(scale.unsqueeze(-1)), out_dtype)
    if out_dtype.itemsize > a.dtype.itemsize:
        return converted(wide_product(torch.mm, a, b), out_dtype)
    with full_precision(a):
        return converted(torch.mm(a, b), out_dtype)


def _fake(a, b, out_dtype, scale=None):
    return a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype)


# An op of its own, because no compiled graph can change PyTorch's settings around one of its products.
guarded_mm = define_op(
    "guarded_mm(Tensor a, Tensor b, ScalarType out_dtype, Tensor? scale=None) -> Tensor", _guarded_mm, _fake
)
"""a [M, K] b [K, N], times scale, in ``out_dtype`` with fp32 sums, without a gradient."""


# {dtype of the operands: settings, each as (where it is, its name, forbidden values, value to use instead)}
_CUDA, _CPU = torch.backends.cuda.matmul, torch.backends.mkldnn.matmul
_ON_CUDA = {
    torch.float32: ((_CUDA, "fp32_precision", ("tf32",), "ieee"),),
    torch.bfloat16: ((_CUDA, "allow_bf16_reduced_precision_reduction", (True,), False),),
    torch.float16: (
        (_CUDA, "allow_fp16_reduced_precision_reduction", (True,), False),
        (_CUDA, "allow_fp16_accumulation", (True,), False),
    ),
}
_ON_CPU = {torch.float32: ((_CPU, "fp32_precision", ("bf16", "tf32"), "ieee"),)}


def full_precision(a: torch.Tensor) -> contextlib.AbstractContextManager:
    """A context in which products of tensors like ``a`` have fp32 sums.

    ``torch.compile`` can trace it only where PyTorch's settings need no change.
    """
    is_enough = is_full_precision(a.dtype, a.is_cuda)
    return contextlib.nullcontext() if is_enough else _set(_to_change(a.dtype, a.is_cuda))


@torch.compiler.assume_constant_result
def is_full_precision(dtype: torch.dtype, is_cuda: bool) -> bool:
    """Whether products of tensors of this dtype have fp32 sums as PyTorch is set.

    To ``torch.compile`` the answer is a constant: a compiled graph keeps to the settings that it was traced under.
    """
    return not _to_change(dtype, is_cuda)


def sum_bf16_products_in_fp32() -> None:
    """Set PyTorch so that all bf16 products of this process have fp32 sums, not only those of mxtrain."""
    for settings, name, _, wanted in _ON_CUDA[torch.bfloat16]:
        setattr(settings, name, wanted)


def wide_product(matmul, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """The fp32 product of matrices, or of batches of matrices, of any dtype; ``matmul`` is torch.mm or torch.bmm."""
    if a.is_cuda and a.dtype != torch.float32 and a.numel() and b.numel():
        with full_precision(a):
            return matmul(a, b, out_dtype=torch.float32)
    a, b = a.float(), b.float()
    with full_precision(a):
        return matmul(a, b)


def _to_change(dtype: torch.dtype, is_cuda: bool) -> list[tuple]:
    """The settings that allow less than fp32: where each is, its name, and the value to use instead."""
    found = (_ON_CUDA if is_cuda else _ON_CPU).get(dtype, ())
    return [
        (settings, name, wanted) for settings, name, unwanted, wanted in found if getattr(settings, name) in unwanted
    ]


@contextlib.contextmanager
def _set(changes: list[tuple]):
    before = [(settings, name, getattr(settings, name)) for settings, name, _ in changes]
    try:
        for settings, name, value in changes:
            setattr(settings, name, value)
        yield
    finally:
        for settings, name, value in before:
            if name == "fp32_precision":
                # It may have been inherited. Set to it, a later change of the whole backend would not reach it.
                setattr(settings, name, "none")
            if getattr(settings, name) != value:
                setattr(settings, name, value)


# Products of stacked experts: one GEMM per expert, on rows that lie one expert below the other.
#
# No quantization block may hold rows of two experts, so that every expert has the bits that it would have alone. Rows
# of an expert are therefore padded with zeros to whole blocks, and an expert without rows gets one block of zeros: on
# some GPUs PyTorch's products leave an empty group's result unwritten. Nothing waits for the device: the number of
# padded rows is a bound that holds for all counts.

# The tensor cores read the scales of 128 rows by 4 blocks of 32 (128 columns) from one piece of memory.
TILE_ROWS, _TILE = 128, 512


class Groups(NamedTuple):
    """Where the rows of T tokens in the order of their experts lie in a matrix with padding.

    Attributes:
        places: int64 [T]: the padded row of every token.
        ends: int32 [E]: the end of every expert's padded rows, at least one block each. Rows beyond the last end belong
            to no expert.
        source: int64 [P], P at least ends[-1]: the token of every padded row, -1 for a row of padding.
    """

    places: torch.Tensor
    ends: torch.Tensor
    source: torch.Tensor


def block_of_rows(mode: str) -> int:
    """The number of rows to whose multiples groups are padded.

    It is a multiple of all block sizes. With groups of whole tiles of scales, neither along the rows nor along the
    tokens does a tile belong to two experts.
    """
    return TILE_ROWS if mode == "native" else LONGEST_BLOCK


def make_groups(counts: torch.Tensor, tokens: int, block: int) -> Groups:
    """Place ``tokens`` rows, of which expert e owns the next counts[e], into groups of whole blocks.

    ``counts`` are integers [E] with a sum of at most ``tokens``; the rows that are left belong to no expert.
    """
    counts = counts.to(torch.int64)
    ends = counts.cumsum(0)
    padded_ends = ((counts.clamp(min=1) + block - 1) // block * block).cumsum(0)
    token = torch.arange(tokens, device=counts.device)
    padding_before = torch.nn.functional.pad(padded_ends - ends, (1, 0))
    places = token + padding_before[torch.searchsorted(ends, token, right=True)]
    blocks = (tokens + block - 1) // block + len(counts)
    source = token.new_full((blocks * block,), -1).index_copy_(0, places, token)
    return Groups(places, padded_ends.to(torch.int32), source)


def collect(x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """x [P, D] -> the rows of the tokens [T, D]; zero for tokens that belong to no expert, whatever x has there."""
    return torch.where((groups.places < groups.ends[-1])[:, None], x[groups.places], 0)


def matmul_rows(a: Operand, b: Operand, ends: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply every expert's rows of a [P, K] by the transpose of its b -> [P, R]. Rows beyond the last end: anything.

    Args:
        b: the experts [E, R, K], cast along K as one matrix: data [E R, K], or [R, E K] as ``cast`` along dimension 0
            makes it.
        ends: as in ``Groups``.
    """
    experts = len(ends)
    is_stacked = b.data.shape[1] == a.data.shape[1]
    data = b.data.unflatten(0, (experts, -1)) if is_stacked else b.data.unflatten(1, (experts, -1)).transpose(0, 1)
    if a.scales is not None:
        # Scales of stacked experts lie one expert after the other, those of experts side by side in every row of tiles.
        tiles = b.scales.view(1 if is_stacked else data.shape[1] // TILE_ROWS, experts, -1)
        scales = tiles.transpose(0, 1).reshape(experts, -1)
        return _grouped_codes(a.data, a.scales.view(a.data.shape[0], -1), data.contiguous(), scales, ends, out_dtype)
    data, scales = converted(data, a.data.dtype), _scales_of_rows(a, b, ends)
    if _is_one_kernel(a, out_dtype, scales):
        return grouped_mm(a.data, data.transpose(1, 2), offs=ends)
    return _grouped_values(a.data, data, ends, out_dtype, scales)


def matmul_tokens(a: Operand, b: Operand, ends: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """Multiply every expert's tokens, columns of a [N, P] and b [D, P] -> [E, N, D]."""
    if a.scales is not None:
        return _grouped_codes(a.data, _by_expert(a, ends), b.data, _by_expert(b, ends), ends, out_dtype)
    data, scales = converted(b.data, a.data.dtype), b.tensor_scale
    if _is_one_kernel(a, out_dtype, scales):
        return grouped_mm(a.data, data.t(), offs=ends)
    return _grouped_values(a.data, data, ends, out_dtype, scales)


def _scales_of_rows(a: Operand, b: Operand, ends: torch.Tensor) -> torch.Tensor | None:
    """What every row of a product of a [P, K] is to be multiplied by, fp32 [P]; None for 1."""
    rows = a.data.shape[0]
    if a.tensor_scale is None and b.tensor_scale is None:
        return None
    groups = torch.searchsorted(ends, torch.arange(rows, device=ends.device), right=True).clamp(max=len(ends) - 1)
    found = (of.tensor_scale for of in (a, b))
    return scale_of_product(*(s if s is None or s.shape[0] == rows else s[groups] for s in found))


def split_rows(x: Operand, heights: Sequence[int]) -> list[Operand]:
    """x [R, K] -> its parts of these heights, of whole tiles if x has scales."""
    parts = x.data.split(heights)
    if x.scales is None:
        return [Operand(part) for part in parts]
    tiles = x.scales.view(x.data.shape[0] // TILE_ROWS, -1).split([height // TILE_ROWS for height in heights])
    return [Operand(part, scales.flatten()) for part, scales in zip(parts, tiles, strict=True)]


def _is_one_kernel(a: Operand, out_dtype: torch.dtype, scales: torch.Tensor | None) -> bool:
    # PyTorch's grouped products of bf16 have fp32 sums, and the result in bf16 only. Others are rare: one product per
    # expert, which waits for the device.
    return scales is None and a.data.dtype == out_dtype == torch.bfloat16


def _one_by_one(
    a: torch.Tensor, b: torch.Tensor, ends: torch.Tensor, out_dtype: torch.dtype, scales: torch.Tensor | None
) -> torch.Tensor:
    stops = ends.tolist()
    own = [slice(start, stop) for start, stop in zip([0, *stops], stops)]
    if b.ndim == 2:
        of_expert = [None] * len(own) if scales is None else scales.unbind()
        return torch.stack([matmul(a[:, part], b[:, part], out_dtype, s) for part, s in zip(own, of_expert)])
    result = a.new_zeros(len(a), b.shape[1], dtype=out_dtype)
    for part, w in zip(own, b, strict=True):
        result[part] = matmul(a[part], w, out_dtype, None if scales is None else scales[part])
    return result


def _by_expert(x: Operand, ends: torch.Tensor) -> torch.Tensor:
    """The scales of x [N, P] in tiles of every expert's columns, one expert after the other."""
    scales, high, wide = x.scales, x.data.shape[0] // TILE_ROWS, x.data.shape[1] // TILE_ROWS
    tiles = scales.view(high, wide, _TILE)
    bounds = torch.nn.functional.pad(ends.to(torch.int64) // TILE_ROWS, (1, 1))
    bounds[-1] = wide  # columns beyond the last end form a group of their own
    column = torch.arange(wide, device=scales.device)
    group = torch.searchsorted(bounds[1:], column, right=True)
    start, width = bounds[group], bounds[group + 1] - bounds[group]
    row = torch.arange(high, device=scales.device)[:, None]
    places = start * high + row * width + column - start
    # A byte a scale, because few operations take E8M0.
    result = torch.empty(high * wide, _TILE, dtype=torch.uint8, device=scales.device)
    result[places.flatten()] = tiles.view(torch.uint8).flatten(0, 1)
    return result.view(scales.dtype).view(x.data.shape[0], -1)


def _codes(a, a_scales, b, b_scales, ends, out_dtype: torch.dtype) -> torch.Tensor:
    blocks, swizzle, b = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4, b.transpose(-2, -1)
    # The only result that PyTorch allows is bf16.
    return scaled_grouped_mm(a, b, a_scales, blocks, b_scales, blocks, swizzle, swizzle, offs=ends).to(out_dtype)


def _fake_grouped(a, b, ends, out_dtype):
    rows = a.shape[0]  # not len(), which would make it a constant of a compiled graph
    shape = (len(ends), rows, b.shape[0]) if b.ndim == 2 else (rows, b.shape[1])
    return a.new_empty(shape, dtype=out_dtype)


# Ops of our own: only the device knows the sizes of the parts of the first, and PyTorch has no fake of
# ``scaled_grouped_mm``. a [P, K] and b [E, R, K] -> [P, R], or a [N, P] and b [D, P] -> [E, N, D].
_grouped_values = define_op(
    "grouped_values(Tensor a, Tensor b, Tensor ends, ScalarType out_dtype, Tensor? scales) -> Tensor",
    _one_by_one,
    lambda a, b, ends, out_dtype, scales: _fake_grouped(a, b, ends, out_dtype),
)
_grouped_codes = define_op(
    "grouped_codes(Tensor a, Tensor a_scales, Tensor b, Tensor b_scales, Tensor ends, ScalarType out_dtype) -> Tensor",
    _codes,
    lambda a, a_scales, b, b_scales, ends, out_dtype: _fake_grouped(a, b, ends, out_dtype),
)
