"""Checks of operands. Each raises ValueError with the offending shape, dtype or device."""

from collections.abc import Sequence

import torch

from mxtrain.kernels.device import INTERPRETED
from mxtrain.recipes.formats import MXFP8
from mxtrain.recipes.recipe import Recipe

FLOAT_DTYPES = (torch.bfloat16, torch.float32)


def _names(dtypes) -> str:
    return " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)


def check_device(name: str, x: torch.Tensor) -> None:
    """Require a device that runs kernels: a GPU, or a CPU under the interpreter."""
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        raise ValueError(f"{name} {tuple(x.shape)} is on {x.device}: expected a CUDA device")


def check_matrix(name: str, x: torch.Tensor, dtypes=FLOAT_DTYPES) -> None:
    """Require a matrix with one of ``dtypes``, on a device that runs kernels."""
    if x.ndim != 2:
        raise ValueError(f"{name} {tuple(x.shape)}: expected a matrix")
    if x.dtype not in dtypes:
        raise ValueError(f"dtype {x.dtype} of {name} {tuple(x.shape)}: expected {_names(dtypes)}")
    check_device(name, x)


def check_whole_blocks(name: str, x: torch.Tensor, block_size: int) -> None:
    """Require rows that consist of whole blocks."""
    if x.shape[1] % block_size:
        raise ValueError(f"{name} {tuple(x.shape)}: expected a row length that is a multiple of {block_size}")


def check_parts(parts: Sequence[torch.Tensor], axis: int, block_size: int) -> None:
    """Require one matrix or more of one dtype, device and size across ``axis``, of whole blocks along it."""
    if not parts:
        raise ValueError("no parts: expected one matrix or more")
    first = parts[0]
    for i, part in enumerate(parts):
        name = f"parts[{i}]"
        check_matrix(name, part)
        if part.dtype != first.dtype or part.device != first.device or part.shape[1 - axis] != first.shape[1 - axis]:
            raise ValueError(
                f"{name} {tuple(part.shape)}, {part.dtype}: expected the dtype, the device and the size in dimension "
                f"{1 - axis} of parts[0] {tuple(first.shape)}, {first.dtype}"
            )
        check_whole_blocks(name, part.t() if axis == 0 else part, block_size)


def check_vector(name: str, x: torch.Tensor, length: int, device: torch.device, dtypes=FLOAT_DTYPES) -> None:
    """Require shape (length,) and one of ``dtypes``, on ``device``."""
    if x.shape != (length,) or x.dtype not in dtypes:
        raise ValueError(f"{name} {tuple(x.shape)} of {x.dtype}: expected ({length},) of {_names(dtypes)}")
    if x.device != device:
        raise ValueError(f"{name} {tuple(x.shape)} is on {x.device}: expected {device}")


def check_number(name: str, x: torch.Tensor, dtype: torch.dtype, device: torch.device) -> None:
    """Require one element of ``dtype``, on ``device``."""
    if x.numel() != 1 or x.dtype != dtype or x.device != device:
        found = f"{tuple(x.shape)} of {x.dtype} on {x.device}"
        raise ValueError(f"{name} {found}: expected one number of {dtype} on {device}")


def check_same(name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Require the shape and device of ``other``."""
    if x.shape != other.shape or x.device != other.device:
        theirs = f"{other_name} {tuple(other.shape)} on {other.device}"
        raise ValueError(f"{name} {tuple(x.shape)} on {x.device} does not go with {theirs}")


def contiguous_factors(
    x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Require a factor per row and per column of ``x`` where they are given, and return them contiguous."""
    factors = {"row_factor": (row_factor, x.shape[0]), "column_factor": (column_factor, x.shape[1])}
    for name, (factor, length) in factors.items():
        if factor is not None:
            check_vector(name, factor, length, x.device)
    return tuple(None if factor is None else factor.contiguous() for factor, _ in factors.values())


def check_mxfp8(recipe: Recipe, block_size: int = MXFP8.block_size) -> None:
    """Require a recipe that casts to MXFP8, and its block size."""
    if recipe.format != MXFP8 or block_size != MXFP8.block_size:
        raise ValueError(
            f"recipe {recipe} with blocks of {block_size}: expected MXFP8 and blocks of {MXFP8.block_size}"
        )
