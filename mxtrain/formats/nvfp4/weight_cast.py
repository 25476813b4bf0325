"""NVFP4 cast of a weight in tiles of 16 x 16 that share a scale, for both orientations from one read.

The gain of a norm can be multiplied in first: W diag(gain). A program holds a strip of 16 rows (``nvfp4.strip``). The
images of several weights can be joined, as in ``nvfp4.cast``.

Bytes per element: 2 or 4 read; 2 (one image, which serves the transpose too) or 2 * (1/2 + 1/16) (codes and scales of
both orientations) written. The tensor scale takes a pass of its own (``tensor_scale.py``), which reads 2 or 4.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import Cast, as_bytes, by_dim, empty_casts, flat, tile_start
from mxtrain.formats.mx.arithmetic import round_to_element
from mxtrain.formats.nvfp4.arithmetic import BLOCK, STORAGE, amax_across, pack_nearest
from mxtrain.formats.nvfp4.four_over_six import registers, scales_of_blocks
from mxtrain.formats.nvfp4.strip import (
    WARPS,
    group_of,
    length_of,
    load_strip,
    repeat_16,
    store_columns,
    store_row,
    tile_columns,
)
from mxtrain.launch.launch import Launch, cdiv, contiguous, converts_fp4, next_power_of_2, register_op


@triton.jit
def _store_codes(
    strip, factor, code, first_row, column, rows, columns, data_ptr, scales_ptr, t_data_ptr, t_scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Store codes and scales of a strip and of its transpose."""
    byte = column // 2 + tl.arange(0, COLUMNS // 2)
    block, blocks = column // 16 + tl.arange(0, COLUMNS // 16), columns // 16
    for i in tl.static_range(16):
        row = first_row + i
        length = length_of(row, rows, columns)
        first, second = tl.split(tl.reshape(strip[i] * factor, (COLUMNS // 2, 2)))
        packed = pack_nearest(first, second, HARDWARE)
        store_row(packed, code, byte, block, blocks, row, length, columns, data_ptr, scales_ptr, FORM)
    eight = tl.zeros((COLUMNS,), tl.int64)
    for j in tl.static_range(8):
        packed = pack_nearest(strip[2 * j] * factor, strip[2 * j + 1] * factor, HARDWARE)
        eight |= packed.to(tl.int64) << (8 * j)
    across = column + tl.arange(0, COLUMNS).to(tl.int64)
    store_columns(eight, code, across, across < columns, first_row, rows, t_data_ptr, t_scales_ptr, FORM)


@triton.jit
def _nvfp4_weight_kernel(
    w_ptr, gain_ptr, tensor_scale_ptr, data_ptr, scales_ptr, t_data_ptr, t_scales_ptr, rows, columns, ends_ptr, groups,
    before, GAIN: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, GROUPS: tl.constexpr, COLUMNS: tl.constexpr,
    ERROR: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, 16, COLUMNS)
    strip = load_strip(w_ptr, None, gain_ptr, first_row, column, rows, columns, False, GAIN, COLUMNS)
    data_ptr += before
    group = 0
    if GROUPS:
        group, _ = group_of(first_row, ends_ptr, groups, GROUPS)
    tensor_scale = tl.load(tensor_scale_ptr + group)
    amax = tl.reshape(amax_across(strip, FORM != "image"), (COLUMNS // 16, 16))
    amax = tl.max(amax, 1).to(tl.float32, bitcast=True)
    code, factor, scale = scales_of_blocks(strip, amax, tensor_scale, "tiles", ERROR)
    factor = repeat_16(factor, COLUMNS)
    if FORM == "image":
        scale = repeat_16(scale, COLUMNS)
        across = column + tl.arange(0, COLUMNS)
        data_ptr += first_row * columns + column
        for i in tl.static_range(16):
            image = (round_to_element(strip[i] * factor, "e2m1") * scale).to(tl.bfloat16)  # exact
            mask = across < length_of(first_row + i, rows, columns)
            tl.store(data_ptr + tl.arange(0, COLUMNS), image, mask=mask)
            data_ptr += columns
    else:
        _store_codes(
            strip, factor, code, first_row, column, rows, columns, data_ptr, scales_ptr, t_data_ptr, t_scales_ptr,
            FORM, HARDWARE, COLUMNS,
        )  # fmt: skip


def _launches(parts, tensor_scales, gain, ends, form: str, error: str = "") -> tuple[list[torch.Tensor], list[Launch]]:
    """Allocate the casts of the weights one below the other, and return them with a launch for each weight."""
    rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
    results = empty_casts(STORAGE, rows, columns, True, form != "image", form, parts[0].device)
    tile, groups = tile_columns(columns), 0 if ends is None else ends.shape[0]
    launches, before = [], 0  # elements of the whole before a weight: only images are cast in several parts
    for w, tensor_scale in zip(parts, tensor_scales):
        if w.numel():
            launches.append(Launch(
                _nvfp4_weight_kernel,
                (cdiv(w.shape[0], BLOCK) * cdiv(columns, tile),),
                (w, gain, tensor_scale, *map(as_bytes, results), *w.shape, ends, groups, before),
                dict(
                    GAIN=gain is not None, FORM=form, HARDWARE=converts_fp4(w),
                    GROUPS=groups and next_power_of_2(groups), COLUMNS=tile, ERROR=error, num_warps=WARPS,
                    **({"maxnreg": registers(tile, WARPS)} if error else {}),
                ),
            ))  # fmt: skip
        before += w.numel()
    return flat(*results), launches


CAST = register_op(
    "nvfp4_weight(Tensor[] parts, Tensor[] tensor_scales, Tensor? gain, Tensor? ends, str form, str error='')"
    " -> Tensor[]",
    _launches,
)


def nvfp4_weight(
    parts: Sequence[torch.Tensor],
    tensor_scales: Sequence[torch.Tensor],
    form: str = "codes",
    gain: torch.Tensor | None = None,
    ends: torch.Tensor | None = None,
    error: str = "",
) -> dict[int, Cast]:
    """Return the NVFP4 cast of W, or of W diag(gain), in tiles of 16 x 16, rounded to nearest.

    Args:
        parts: W alone, bf16 or fp32 [N, D], D a multiple of 16. The last tiles of rows may be incomplete. Or, for form
            "image", several weights of one dtype and of whole tiles, which one below the other are W.
        tensor_scales: one fp32 number for each part, a power of two.
        form, error: as for ``nvfp4_cast``. An image is [N, D].
        gain: bf16 or fp32 [D], multiplied in first, in fp32.
        ends: as for ``nvfp4_cast``. Each group of rows of W has its own tensor scale, fp32 [G].

    Returns:
        (data, scales) of W by dimension: 1 for fprop, 0 for its transpose, an operand of dgrad. One image serves both,
        not transposed.
    """
    results = CAST(contiguous(*parts), list(tensor_scales), *contiguous(gain, ends), form, error)
    return by_dim(results * 2 if form == "image" else results, (1, 0), form)
