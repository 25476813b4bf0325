"""Matrices before and after their cast, and what happens to them on the way to it."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch

from mxtrain.formats.recipe import Recipe
from mxtrain.launch.functions import define_op

# The form of operand that the kernels write for each mode that uses them.
KERNEL_FORM = {"native": "blocked", "emulated": "image"}

# Of dtypes that hold several elements in a byte.
ELEMENTS_PER_BYTE = {torch.float4_e2m1fn_x2: 2}


class Operand(NamedTuple):
    """One operand of a GEMM: a matrix [R, K] quantized in blocks along K, the axis that the GEMM reduces over.

    Attributes:
        data: native and fp8_merged: codes [R, K], or [R, K / 2] of four bits, two per byte. Emulated and reference: the
            exact values of codes times scales, in bf16 (emulated) or fp32 (reference), not multiplied by
            ``tensor_scale``.
        scales: native: the block scales in the blocked 128x4 layout that the tensor cores read. fp8_merged: as
            ``mxtrain.formats.mx.merged.merge`` makes them. Otherwise None.
        tensor_scale: native, of a format with tensor scales: the scale of the whole matrix, fp32 [], or one for each
            row [R], or for each group of rows [G]. Emulated and reference: the same if it is exact. None if it is a
            power of two, which ``data`` contains.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None

    @property
    def values(self) -> torch.Tensor:
        """What an emulated operand stands for, not one of groups, in the dtype of ``data`` or in fp32."""
        return self.data if self.tensor_scale is None else self.data.float() * self.tensor_scale.unsqueeze(-1)


def scale_of_product(a: torch.Tensor | None, b: torch.Tensor | None) -> torch.Tensor | None:
    """Return what the product of operands with these tensor scales is to be multiplied by; None stands for 1."""
    return a if b is None else b if a is None else a * b


class Codes(NamedTuple):
    """The same matrix as it is stored or sent between processes, in every execution mode.

    Attributes:
        data: codes [R, K], or uint8 [R, K / 2] of four bits, two per byte, the first in the low half. For a recipe
            without a format, the values [R, K].
        scales: row-major block scales [R, K / block size]; None without a format.
        tensor_scale: of a format with tensor scales, in every mode: that of the whole matrix, fp32 [], or one for each
            row, fp32 [R].
        top: of exact tensor scales: ``tensor_scale`` is a largest magnitude instead, ``top`` times the scale.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None
    top: float | None = None

    @property
    def scale(self) -> torch.Tensor | None:
        """The tensor scales themselves."""
        scale = self.tensor_scale
        return scale if self.top is None else scale / scale.new_full((), self.top)

    def rows(self, order: torch.Tensor | None) -> "Codes":
        """Return the rows in another order, int64 [R]; None keeps the order."""
        if order is None:
            return self
        # Index bytes: not every PyTorch indexes 8-bit floats.
        data, scales = (t.view(torch.uint8)[order].view(t.dtype) for t in (self.data, self.scales))
        return self._replace(data=data, scales=scales)


class CastSpec(NamedTuple):
    """What a matrix X [R, C] is, and what happens to it before and after its cast.

    A named tuple, because one is made for every cast: a frozen dataclass takes twice as long.

    Attributes:
        role: "input" X, "weight" W or "gradient" dY of a layer. Weights may be cast in tiles.
        axis: several matrices, joined along this axis, are X. Kernels do not store the joined matrix.
        row_factor: [R], multiplied in before the cast, in fp32 (fp64 for fp64), without rounding in between.
        column_factor: [C], likewise.
        signs: packed signs of the Hadamard transform along dimension 0, int64 []; None without a transform.
        draws: for each matrix what its random bits come from (``mxtrain.nn.recipe_module``); None, or a recipe that
            rounds to nearest: round to nearest.
        tensor_scale: a power of two, or under four over six a largest magnitude. None takes it from X.
        group: name of the process group that holds X together; None for a whole X. The processes share a tensor scale;
            block scales need no communication.
        source: int64 [R]; row i of X is row source[i] of a single matrix, zero where source[i] is negative.
        ends: int32 [G], multiples of a block, the ends of groups of rows of X. Each group has a tensor scale of its
            own, and draws int64 [4]: ``draws`` has one tensor [G, 4]. Rows beyond the last end: any values.
        experts: matrices one below the other are so many stacked experts each; X is joined expert by expert, and each
            expert has a tensor scale of its own.
        as_codes: return ``Codes``. For one dimension, and one matrix of whole blocks.
    """

    role: Literal["input", "weight", "gradient"] = "input"
    axis: int = 0
    row_factor: torch.Tensor | None = None
    column_factor: torch.Tensor | None = None
    signs: torch.Tensor | None = None
    draws: Sequence[torch.Tensor | None] | None = None
    tensor_scale: float | None = None
    group: str | None = None
    source: torch.Tensor | None = None
    ends: torch.Tensor | None = None
    experts: int = 1
    as_codes: bool = False

    def is_transformed(self, recipe: Recipe) -> bool:
        """Return whether X is Hadamard-transformed for a cast along dimension 0, which for weights is dgrad's."""
        return recipe.hadamard and self.role != "weight"

    def joined(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return X before its factors."""
        x = parts[0] if len(parts) == 1 else joined(parts, self.axis, self.experts)
        return x if self.source is None else rows_in_order(x, self.source)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        """Return X times its factors."""
        x = x if self.row_factor is None else at_least_fp32(x) * self.row_factor.unsqueeze(-1)
        return x if self.column_factor is None else at_least_fp32(x) * self.column_factor


PLAIN = CastSpec()


def joined(parts: Sequence[torch.Tensor], axis: int, experts: int = 1) -> torch.Tensor:
    """Join matrices along ``axis``; along 0, where each is so many stacked experts, expert by expert."""
    if axis or experts == 1:
        return torch.cat(tuple(parts), axis)
    return torch.cat([part.unflatten(0, (experts, -1)) for part in parts], 1).flatten(0, 1)


def _join_values(parts: list[torch.Tensor], experts: int, dtype: torch.dtype) -> torch.Tensor:
    return joined(parts, 0, experts).to(dtype)


def _fake(parts: list[torch.Tensor], experts: int, dtype: torch.dtype) -> torch.Tensor:
    return parts[0].new_empty(sum(part.shape[0] for part in parts), parts[0].shape[1], dtype=dtype)


# An op, so that a compiled backward joins weights again, as it casts them again (``FormatOps.weight_casts``).
JOIN_VALUES = define_op("join_values(Tensor[] parts, int experts, ScalarType dtype) -> Tensor", _join_values, _fake)


def joined_values(parts: Sequence[torch.Tensor], experts: int, dtype: torch.dtype) -> torch.Tensor:
    """``joined`` along 0 in ``dtype``; a single matrix that has this dtype is not copied."""
    return parts[0] if len(parts) == 1 and parts[0].dtype == dtype else JOIN_VALUES(list(parts), experts, dtype)


def rows_in_order(x: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """x [R, C], source int64 [S] -> [S, C]: row source[i] of x at place i, zeros where source[i] is negative."""
    with_zeros = torch.cat((x, x.new_zeros(1, x.shape[1])))
    return with_zeros[torch.where(source < 0, x.shape[0], source)]


def at_least_fp32(x: torch.Tensor) -> torch.Tensor:
    """Return x in fp32, or unchanged if it is fp64."""
    return converted(x, torch.promote_types(x.dtype, torch.float32))


def converted(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return x in ``dtype``; x itself if it already has that dtype.

    Not ``Tensor.to``: in torch 2.11, if the forward of a compiled autograd function calls a ``to`` that does nothing
    on a result, the result loses its gradient.
    """
    return x if x.dtype == dtype else x.to(dtype)


def split_blocks(x: torch.Tensor, block_size: int) -> torch.Tensor:
    """[..., D] -> [..., D / block_size, block_size]."""
    # Not Tensor.unflatten: under torch.set_default_device, Dynamo cannot trace it.
    return x.reshape(*x.shape[:-1], x.shape[-1] // block_size, block_size)


def tile_amax(amax: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Give the blocks of a square tile the largest of their maxima ``amax``, any shape; NaN if any block has NaN.

    A tile has ``size`` blocks of ``size`` elements along ``dim``, the dimension across the blocks. The last tile may be
    incomplete.
    """
    across = amax.movedim(dim, -1)
    length = across.shape[-1]
    tiles = split_blocks(torch.nn.functional.pad(across, (0, -length % size)), size).amax(-1)
    return tiles.repeat_interleave(size, -1)[..., :length].movedim(-1, dim)


def values_dtype(mode: str, dtype: torch.dtype = torch.float32) -> torch.dtype:
    """Return the dtype in which ``mode`` multiplies values: bf16 if emulated, fp32 (fp64 for fp64) in reference."""
    return torch.promote_types(dtype, torch.float32) if mode == "reference" else torch.bfloat16
