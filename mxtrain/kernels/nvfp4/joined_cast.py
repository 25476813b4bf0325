"""NVFP4 casts of several matrices into one image: each matrix is read and written once, and nothing is copied.

Every part has its own tensor scale and its own random bits, and the bits that it has alone. One image holds them
because its values include the tensor scales; codes would need one scale for all.

Bytes per element: as ``nvfp4.cast`` and ``nvfp4.weight_cast``.
"""

from collections.abc import Mapping, Sequence

import torch

from mxtrain.errors import require_one_of
from mxtrain.kernels.checks import check_number, check_parts, check_vector, check_whole_blocks, contiguous_factors
from mxtrain.kernels.integers import round_up
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.kernels.nvfp4.arithmetic import BLOCK
from mxtrain.kernels.nvfp4.cast import check_draws, checked_dims, launch_nvfp4_cast
from mxtrain.kernels.nvfp4.weight_cast import launch_weight_cast
from mxtrain.untraced import untraced


def _places(parts: list[torch.Tensor], axis: int, multiple: int = 1) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Allocate the image of all parts, its rows rounded up; return it and the place of every part."""
    sizes = [part.shape[axis] for part in parts]
    rows, columns = (sum(sizes), parts[0].shape[1]) if axis == 0 else (parts[0].shape[0], sum(sizes))
    image = torch.empty(round_up(rows, multiple), columns, dtype=torch.bfloat16, device=parts[0].device)
    return image, list(image.split(sizes, axis))


def _cast_implementation(
    x: torch.Tensor,
    others: list[torch.Tensor],
    axis: int,
    column_factor: torch.Tensor | None,
    row_scales: list[torch.Tensor],
    column_scales: list[torch.Tensor],
    signs: torch.Tensor | None,
    draws: list[torch.Tensor],
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    parts = [x, *others]
    by_row = by_column = None
    row_places = column_places = nothing = [None] * len(parts)
    if row_scales:
        by_row, row_places = _places(parts, axis)
    if column_scales:
        by_column, column_places = _places(parts, axis, BLOCK)
    launches = [
        launch_nvfp4_cast(
            part, None, column_factor, row_scale, column_scale, (row_place, None), (column_place, None), signs, bits,
            "image",
        )
        for part, row_place, row_scale, column_place, column_scale, bits in zip(
            parts, row_places, row_scales or nothing, column_places, column_scales or nothing, draws or nothing
        )
    ]  # fmt: skip
    return [image for image in (by_row, by_column) if image is not None], tuple(filter(None, launches))


def _weight_implementation(
    w: torch.Tensor, others: list[torch.Tensor], tensor_scales: list[torch.Tensor], gain: torch.Tensor | None
) -> tuple[list[torch.Tensor], tuple[Launch, ...]]:
    image, places = _places([w, *others], 0)
    launches = [
        launch_weight_cast(part, gain, scale, place, None, None, None, "image")
        for part, scale, place in zip([w, *others], tensor_scales, places)
    ]
    return [image], tuple(filter(None, launches))


_nvfp4_joined_cast = register_op(
    "nvfp4_joined_cast(Tensor x, Tensor[] others, int axis, Tensor? column_factor, Tensor[] row_scales,"
    " Tensor[] column_scales, Tensor? signs, Tensor[] draws) -> Tensor[]",
    _cast_implementation,
)
_nvfp4_joined_weight = register_op(
    "nvfp4_joined_weight(Tensor w, Tensor[] others, Tensor[] tensor_scales, Tensor? gain) -> Tensor[]",
    _weight_implementation,
)


def nvfp4_joined_cast(
    parts: Sequence[torch.Tensor],
    axis: int,
    tensor_scales: Mapping[int, Sequence[torch.Tensor]],
    *,
    signs: torch.Tensor | None = None,
    draws: Sequence[torch.Tensor] | None = None,
    column_factor: torch.Tensor | None = None,
) -> dict[int, torch.Tensor]:
    """Return the images of ``nvfp4.cast.nvfp4_cast`` of all parts, joined. One launch for each part.

    Args:
        parts: bf16 or fp32 matrices of one dtype, whole blocks of 16 along rows and along ``axis``.
        axis: 0 for parts one below the other, 1 for parts side by side.
        tensor_scales: for each dimension to cast along, 1 or 0, one fp32 number for each part.
        signs: as for ``nvfp4_cast``, the same for all parts.
        draws: as for ``nvfp4_cast``, for each part. None rounds to nearest.
        column_factor: as for ``nvfp4_cast``; for axis 0 only.

    Returns:
        An image for each dimension, not transposed; the image along dimension 0 has its rows rounded up to a multiple
        of 16.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    dims = checked_dims(tensor_scales)
    scales = [list(tensor_scales[dim]) for dim in dims]
    images = _checked_cast(list(parts), axis, tuple(dims), scales, signs, list(draws or ()), column_factor)
    return dict(zip(dims, images))


@untraced
def _checked_cast(parts, axis, dims, scales, signs, draws, column_factor):
    require_one_of("axis", axis, (0, 1) if column_factor is None else (0,))
    check_parts(parts, axis, BLOCK)
    check_whole_blocks("parts[0]", parts[0], BLOCK)
    device = parts[0].device
    for of_dim in scales:
        _check_scales(of_dim, parts)
    if signs is not None:
        check_number("signs", signs, torch.int64, device)
    if draws and len(draws) != len(parts):
        raise ValueError(f"{len(draws)} draws for {len(parts)} parts: expected one for each, or None")
    for i, (part, bits) in enumerate(zip(parts, draws)):
        check_draws(bits, f"parts[{i}]", part)
    _, column_factor = contiguous_factors(parts[0], None, column_factor)
    first, *others = (part.contiguous() for part in parts)
    row_scales, column_scales = (dict(zip(dims, scales)).get(dim, []) for dim in (1, 0))
    return _nvfp4_joined_cast(first, others, axis, column_factor, row_scales, column_scales, signs, draws)


@untraced
def nvfp4_joined_weight(
    ws: Sequence[torch.Tensor], tensor_scales: Sequence[torch.Tensor], gain: torch.Tensor | None = None
) -> torch.Tensor:
    """Return the images of ``nvfp4.weight_cast.nvfp4_weight`` of all weights, one below the other.

    Args:
        ws: bf16 or fp32 [N_i, D] of one dtype; N_i and D are multiples of 16.
        tensor_scales: one fp32 number for each weight.
        gain: as for ``nvfp4_weight``.

    Raises:
        ValueError: for another shape, dtype or device.
    """
    check_parts(ws, 0, BLOCK)
    check_whole_blocks("parts[0]", ws[0], BLOCK)
    _check_scales(tensor_scales, ws)
    if gain is not None:
        check_vector("gain", gain, ws[0].shape[1], ws[0].device)
        gain = gain.contiguous()
    first, *others = (w.contiguous() for w in ws)
    return _nvfp4_joined_weight(first, others, list(tensor_scales), gain)[0]


def _check_scales(scales: Sequence[torch.Tensor], parts: Sequence[torch.Tensor]) -> None:
    if len(scales) != len(parts):
        raise ValueError(f"{len(scales)} tensor scales for {len(parts)} parts: expected one for each")
    for scale in scales:
        check_number("tensor scale", scale, torch.float32, parts[0].device)
