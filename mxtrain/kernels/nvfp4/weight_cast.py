"""NVFP4 cast of a weight in tiles of 16 x 16 that share a scale, for both orientations from one read.

The gain of a norm can be multiplied in first: W diag(gain). A program holds a strip of 16 rows (``nvfp4.strip``). The
images of several weights can be joined, as in ``nvfp4.cast``.

Bytes per element: 2 or 4 read; 2 (one image, which serves the transpose too) or 2 * (1/2 + 1/16) (codes and scales of
both orientations) written. The maximum for the tensor scale takes a pass of its own (``nvfp4_amax``), which reads 2 or
4.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.custom_op import untraced
from mxtrain.errors import require_one_of
from mxtrain.kernels.blocks import tile_start
from mxtrain.kernels.cast_results import FORMS, NVFP4_STORAGE, as_bytes, empty_cast, empty_column_cast, flat
from mxtrain.kernels.checks import check_matrix, check_number, check_parts, check_vector, check_whole_blocks
from mxtrain.kernels.device import converts_fp4
from mxtrain.kernels.integers import cdiv
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.nvfp4.arithmetic import (
    BLOCK,
    amax_across,
    image_of,
    inverse_of,
    multiplier,
    pack_nearest,
    round_to_nearest,
    scale_of_block,
)
from mxtrain.kernels.nvfp4.cast import places
from mxtrain.kernels.nvfp4.strip import WARPS, length_of, load_strip, repeat_16, store_columns, store_row, tile_columns


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
    w_ptr, gain_ptr, tensor_scale_ptr, data_ptr, scales_ptr, t_data_ptr, t_scales_ptr, rows, columns,
    GAIN: tl.constexpr, FORM: tl.constexpr, HARDWARE: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, 16, COLUMNS)
    strip = load_strip(w_ptr, None, gain_ptr, first_row, column, rows, columns, False, GAIN, COLUMNS)
    tensor_scale = tl.load(tensor_scale_ptr)
    inverse = inverse_of(tensor_scale)
    amax = tl.max(tl.reshape(amax_across(strip), (COLUMNS // 16, 16)), 1).to(tl.float32, bitcast=True)
    code, scale = scale_of_block(amax, inverse)
    factor = repeat_16(multiplier(scale, inverse), COLUMNS)
    if FORM == "image":
        scale = repeat_16(scale, COLUMNS)
        across = column + tl.arange(0, COLUMNS)
        for i in tl.static_range(16):
            row = first_row + i
            image = image_of(round_to_nearest(strip[i] * factor), scale, tensor_scale)
            tl.store(data_ptr + row * columns + across, image, mask=across < length_of(row, rows, columns))
    else:
        _store_codes(
            strip, factor, code, first_row, column, rows, columns, data_ptr, scales_ptr, t_data_ptr, t_scales_ptr,
            FORM, HARDWARE, COLUMNS,
        )  # fmt: skip


def _cast_one(
    w: torch.Tensor, gain: torch.Tensor | None, tensor_scale: torch.Tensor, form: str
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = w.shape
    data, scales = empty_cast(NVFP4_STORAGE, rows, columns, form, w.device)
    t_data = t_scales = None
    if form != "image":
        t_data, t_scales = empty_column_cast(NVFP4_STORAGE, rows, columns, form, w.device)
    results = (data, scales, t_data, t_scales)
    return flat(*results), _launch(w, gain, tensor_scale, results, form)


def _cast_joined(
    w: torch.Tensor, others: list[torch.Tensor], tensor_scales: list[torch.Tensor], gain: torch.Tensor | None
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    image, places_of = places([w, *others], 0)
    launches = [
        _launch(part, gain, scale, (place, None, None, None), "image")
        for part, scale, place in zip([w, *others], tensor_scales, places_of)
    ]
    return [image], tuple(filter(None, launches))


def _launch(
    w: torch.Tensor, gain: torch.Tensor | None, tensor_scale: torch.Tensor, results: tuple, form: str
) -> Launch | None:
    """Return the launch that stores the casts of w in ``results``, the fields of a ``WeightCast``; None for no w."""
    if w.numel() == 0:
        return None
    rows, columns = w.shape
    tile = tile_columns(columns)
    return Launch(
        _nvfp4_weight_kernel,
        (cdiv(rows, BLOCK) * cdiv(columns, tile),),
        (w, gain, tensor_scale, *map(as_bytes, results), rows, columns),
        dict(GAIN=gain is not None, FORM=form, HARDWARE=converts_fp4(w), COLUMNS=tile, num_warps=WARPS),
    )


_nvfp4_weight = register_op(
    "nvfp4_weight(Tensor w, Tensor? gain, Tensor tensor_scale, str form) -> Tensor[]", _cast_one
)
_nvfp4_joined_weight = register_op(
    "nvfp4_joined_weight(Tensor w, Tensor[] others, Tensor[] tensor_scales, Tensor? gain) -> Tensor[]", _cast_joined
)


class WeightCast(NamedTuple):
    """Result of ``nvfp4_weight``: W for fprop, and its transpose for dgrad, None for an image."""

    data: torch.Tensor
    scales: torch.Tensor | None
    transposed_data: torch.Tensor | None
    transposed_scales: torch.Tensor | None


def nvfp4_weight(
    w: torch.Tensor, tensor_scale: torch.Tensor, form: str = "codes", gain: torch.Tensor | None = None
) -> WeightCast:
    """Return the NVFP4 cast of W, or of W diag(gain), in tiles of 16 x 16, rounded to nearest.

    Args:
        w: bf16 or fp32 [N, D], D a multiple of 16. The last tiles of rows may be incomplete.
        tensor_scale: one fp32 number on the device of w, a power of two.
        form: with N' = N rounded up to a multiple of 16: "codes": uint8 [N, D / 2] and [D, N' / 2], two elements a
            byte, and float8_e4m3fn scales [N, D / 16] and [D, N' / 16]; "blocked": the same codes, scales flat in the
            128x4 layout, padding zero; "image": bf16 [N, D], element * block scale * tensor scale, exact. The
            transpose of this image is the image of the transpose.
        gain: bf16 or fp32 [D], multiplied in first, in fp32.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    require_one_of("form", form, FORMS)
    check_matrix("w", w)
    check_whole_blocks("w", w, BLOCK)
    gain = _contiguous_gain(gain, w)
    check_number("tensor_scale", tensor_scale, torch.float32, w.device)
    results = _nvfp4_weight(w.contiguous(), gain, tensor_scale, form)
    return WeightCast(results[0], None, None, None) if form == "image" else WeightCast(*results)


@untraced
def nvfp4_joined_weight(
    ws: Sequence[torch.Tensor], tensor_scales: Sequence[torch.Tensor], gain: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the images of ``nvfp4_weight`` of all weights, one below the other.

    Args:
        ws: bf16 or fp32 [N_i, D] of one dtype; N_i and D are multiples of 16.
        tensor_scales: one fp32 number for each weight.
        gain: as for ``nvfp4_weight``.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    check_parts(ws, 0, BLOCK)
    check_whole_blocks("parts[0]", ws[0], BLOCK)
    if len(tensor_scales) != len(ws):
        raise ValueError(f"{len(tensor_scales)} tensor scales for {len(ws)} parts: expected one for each")
    for scale in tensor_scales:
        check_number("tensor scale", scale, torch.float32, ws[0].device)
    first, *others = (w.contiguous() for w in ws)
    return _nvfp4_joined_weight(first, others, list(tensor_scales), _contiguous_gain(gain, first))[0]


def _contiguous_gain(gain: torch.Tensor | None, w: torch.Tensor) -> torch.Tensor | None:
    if gain is None:
        return None
    check_vector("gain", gain, w.shape[1], w.device)
    return gain.contiguous()
