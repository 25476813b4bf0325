"""The NVFP4 tensor scales of matrices, by a pass of its own over each: 2 or 4 bytes read per element.

A tensor scale grows with the largest magnitude. So a program computes the scale of its part of the matrix, and raises
the matrix's scale to it: after a fill, one launch for each matrix. In plain PyTorch a scale takes 15 operations more.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import magnitude_bits, tile_start
from mxtrain.formats.nvfp4 import TENSOR_SCALE_MIN
from mxtrain.formats.nvfp4.arithmetic import BLOCK, amax_across, tensor_scale_bits
from mxtrain.formats.nvfp4.strip import WARPS, group_of, load_strip, quarter_hadamard, tile_columns
from mxtrain.launch.launch import Launch, cdiv, contiguous, next_power_of_2, register_op


@triton.jit
def _raise_scale(scale_ptr, before, strip, FACTOR: tl.constexpr, EXACT: tl.constexpr):
    """Raise a scale to that of FACTOR * strip, FACTOR a power of two. ``before``: its bits so far, or earlier.

    Bits of NaN are above all others.
    """
    amax = tl.max(amax_across(strip), 0).to(tl.float32, bitcast=True) * FACTOR
    bits = magnitude_bits(amax) if EXACT else tensor_scale_bits(amax)
    # Atomic operations on one address take turns, but few of many scales are larger than all before.
    tl.atomic_max(scale_ptr, bits, mask=bits > before, sem="relaxed")


@triton.jit(do_not_specialize=["signs_ptr"])
def _tensor_scale_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, scales_ptr, slot, rows, columns, signs_ptr, ends_ptr, groups,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, HADAMARD: tl.constexpr, GROUPS: tl.constexpr,
    COLUMNS: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, 16, COLUMNS)
    group, end = 0, rows
    if GROUPS:
        group, _ = group_of(first_row, ends_ptr, groups, GROUPS)
        end = tl.load(ends_ptr + groups - 1)
    at = scales_ptr.to(tl.pointer_type(tl.int32), bitcast=True) + (slot // 16 + group * (1 + HADAMARD))
    # Read past the L1 cache, where others' results do not arrive.
    before = tl.load(at, cache_modifier=".cg")
    if HADAMARD:
        transformed_before = tl.load(at + 1, cache_modifier=".cg")
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, end, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    _raise_scale(at, before, strip, 1.0, EXACT)
    if HADAMARD:
        exact: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not (ROW_FACTOR or COLUMN_FACTOR)
        _raise_scale(at + 1, transformed_before, quarter_hadamard(strip, tl.load(signs_ptr), exact), 4.0, EXACT)


def _launches(parts, row_factor, column_factor, signs, ends, exact: bool = False) -> tuple[torch.Tensor, list[Launch]]:
    groups = 0 if ends is None else ends.shape[0]
    shape = groups or len(parts), 1 if signs is None else 2
    scales = torch.full(shape, 0.0 if exact else TENSOR_SCALE_MIN, dtype=torch.float32, device=parts[0].device)
    launches = []
    for i, x in enumerate(parts):
        rows, columns = x.shape
        if x.numel() == 0:
            continue
        tile = tile_columns(columns)
        launches.append(Launch(
            _tensor_scale_kernel,
            (cdiv(rows, BLOCK) * cdiv(columns, tile),),
            # The place of the scale, times 16 because Triton compiles one kernel for all multiples of 16.
            (x, row_factor, column_factor, scales, 16 * i * shape[1], rows, columns, signs, ends, groups),
            dict(
                ROW_FACTOR=row_factor is not None, COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None,
                GROUPS=groups and next_power_of_2(groups), COLUMNS=tile, EXACT=exact, num_warps=WARPS,
            ),
        ))  # fmt: skip
    return scales, launches


TENSOR_SCALES = register_op(
    "nvfp4_tensor_scales(Tensor[] parts, Tensor? row_factor, Tensor? column_factor, Tensor? signs, Tensor? ends,"
    " bool exact=False) -> Tensor",
    _launches,
)


def nvfp4_tensor_scales(
    parts: Sequence[torch.Tensor],
    signs: torch.Tensor | None = None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """Return the tensor scale of each part, fp32 [n, 1], or with ``signs`` [n, 2]: as it is, and transformed.

    The bits are those of ``reference.power_of_two_tensor_scale``. Arguments as for ``nvfp4_cast``, which takes
    the result. With ``ends``, the n scales are those of the groups of rows of a single matrix.
    ``exact``: return the largest magnitudes, from which four over six makes its scales.
    """
    return TENSOR_SCALES(contiguous(*parts), *contiguous(row_factor, column_factor), signs, *contiguous(ends), exact)
