"""The last step of a norm's backward: dweight and dbias from the sums that the programs have stored."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxtrain.kernels.device import sm_count
from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.launch import Launch
from mxtrain.kernels.norm.rms_norm_plan import reduction_tile


@triton.jit
def _sum_partials_kernel(
    partials_ptr, first_ptr, second_ptr, programs, columns,
    TWO: tl.constexpr, PROGRAMS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < columns
    if TWO:
        partials_ptr += tl.program_id(1).to(tl.int64) * programs * columns
    total = tl.zeros((PROGRAMS, COLUMNS), tl.float32)
    for first in range(0, programs, PROGRAMS):
        program = first + tl.arange(0, PROGRAMS)
        offsets = program.to(tl.int64)[:, None] * columns + column[None, :]
        total += tl.load(partials_ptr + offsets, mask=(program < programs)[:, None] & inside[None, :], other=0.0)
    row = tl.sum(total, 0)
    # Two stores, because the results may have different dtypes.
    if tl.program_id(1) == 0:
        tl.store(first_ptr + column, row.to(first_ptr.dtype.element_ty), mask=inside)
    elif TWO:
        tl.store(second_ptr + column, row.to(second_ptr.dtype.element_ty), mask=inside)


def sum_partials(partials: torch.Tensor, results: Sequence[torch.Tensor]) -> Launch:
    """Return the launch that sums partials, fp32 [1 or 2, programs, D], over programs into one or two results [D]."""
    count, programs, columns = partials.shape
    height, width, warps = reduction_tile(programs, columns, sm_count(partials.device))
    return Launch(
        _sum_partials_kernel,
        (cdiv(columns, width), count),
        (partials, results[0], results[1] if count == 2 else None, programs, columns),
        dict(TWO=count == 2, PROGRAMS=height, COLUMNS=width, num_warps=warps),
    )
