"""The NVFP4 tensor scale of a matrix: largest magnitudes of its parts by one kernel, the scale from them by another.

Reading the matrix takes a pass of its own: 2 or 4 bytes per element. In plain PyTorch a scale from the maxima takes 15
operations. A Llama block has 34 scales, and their operations were half of the graph that ``torch.compile`` got.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.casts import flat, tile_start
from mxtrain.kernels.device import cdiv, next_power_of_2
from mxtrain.kernels.launch import Launch, contiguous, register_op
from mxtrain.kernels.nvfp4.arithmetic import BLOCK, amax_across
from mxtrain.kernels.nvfp4.strip import WARPS, load_strip, quarter_hadamard, tile_columns
from mxtrain.recipes.formats import NVFP4_RANGE, NVFP4_TENSOR_SCALE_MIN

_RANGE, _MIN = tl.constexpr(NVFP4_RANGE), tl.constexpr(NVFP4_TENSOR_SCALE_MIN)
# Numbers that the program reads at a time.
_MOST = 8192


@triton.jit(do_not_specialize=["signs_ptr"])
def _nvfp4_amax_kernel(
    x_ptr, row_factor_ptr, column_factor_ptr, amax_ptr, transformed_ptr, rows, columns, signs_ptr,
    ROW_FACTOR: tl.constexpr, COLUMN_FACTOR: tl.constexpr, HADAMARD: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    first_row, column = tile_start(columns, 16, COLUMNS)
    strip = load_strip(
        x_ptr, row_factor_ptr, column_factor_ptr, first_row, column, rows, columns, ROW_FACTOR, COLUMN_FACTOR, COLUMNS
    )
    tl.store(amax_ptr + tl.program_id(0), tl.max(amax_across(strip), 0).to(tl.float32, bitcast=True))
    if HADAMARD:
        exact: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and not (ROW_FACTOR or COLUMN_FACTOR)
        quarter = tl.max(amax_across(quarter_hadamard(strip, tl.load(signs_ptr), exact)), 0)
        tl.store(transformed_ptr + tl.program_id(0), quarter.to(tl.float32, bitcast=True) * 4.0)


def _amax_launch(
    x: torch.Tensor, row_factor: torch.Tensor | None, column_factor: torch.Tensor | None, signs: torch.Tensor | None
) -> tuple[list[torch.Tensor], Launch | None]:
    rows, columns = x.shape
    tile = tile_columns(columns) if columns else 1
    programs = cdiv(rows, BLOCK) * cdiv(columns, tile)
    amax = torch.empty(programs, dtype=torch.float32, device=x.device)
    transformed = None if signs is None else torch.empty_like(amax)
    results = flat(amax, transformed)
    if x.numel() == 0:
        return results, None
    launch = Launch(
        _nvfp4_amax_kernel,
        (programs,),
        (x, row_factor, column_factor, amax, transformed, rows, columns, signs),
        dict(
            ROW_FACTOR=row_factor is not None, COLUMN_FACTOR=column_factor is not None, HADAMARD=signs is not None,
            COLUMNS=tile, num_warps=WARPS,
        ),
    )  # fmt: skip
    return results, launch


_nvfp4_amax = register_op(
    "nvfp4_amax(Tensor x, Tensor? row_factor, Tensor? column_factor, Tensor? signs) -> Tensor[]", _amax_launch
)


def nvfp4_amax(
    x: torch.Tensor,
    signs: torch.Tensor | None = None,
    row_factor: torch.Tensor | None = None,
    column_factor: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return largest magnitudes of x and, with ``signs``, of x transformed along dimension 0, from one read of x.

    x is a matrix; arguments as for ``nvfp4_cast``.

    Returns:
        Two fp32 vectors, the second None without ``signs``. Each element is the maximum over a part of the matrix, NaN
        if that part holds one. ``nvfp4_tensor_scale`` takes them.
    """
    amax, *transformed = _nvfp4_amax(*contiguous(x, row_factor, column_factor), signs)
    return amax, transformed[0] if transformed else None


@triton.jit
def _tensor_scale_kernel(maxima_ptr, scale_ptr, count, ends_ptr, tiles, GROUPED: tl.constexpr, SIZE: tl.constexpr):
    group, start = tl.program_id(0), 0
    if GROUPED:
        # A strip of 16 rows has ``tiles`` maxima.
        start = tl.load(ends_ptr + group - 1, mask=group > 0, other=0) // 16 * tiles
        count = tl.load(ends_ptr + group) // 16 * tiles
    # The bits of magnitudes have the order of the magnitudes, and those of NaN come last.
    largest = tl.zeros((SIZE,), tl.int32)
    for first in range(start, count, SIZE):
        at = first + tl.arange(0, SIZE)
        maxima = tl.load(maxima_ptr + at, mask=at < count, other=0.0)
        largest = tl.maximum(largest, maxima.to(tl.int32, bitcast=True))
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, _RANGE), _MIN, propagate_nan=tl.PropagateNan.ALL)
    # The next power of two: carry any mantissa into the exponent, then drop the mantissa.
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits)
    tl.store(scale_ptr + group, bits.to(tl.float32, bitcast=True))


def _scale_launch(maxima: torch.Tensor, ends: torch.Tensor | None) -> tuple[list[torch.Tensor], Launch | None]:
    # Not a scalar: Inductor would launch a kernel to fill it with zeros.
    scale = torch.empty(1 if ends is None else ends.shape[0], dtype=torch.float32, device=maxima.device)
    count, groups = maxima.numel(), scale.numel()
    if isinstance(count, torch.SymInt):  # its bit length would give a compiled graph one number of tokens
        return [scale], None
    size = min(next_power_of_2(max(count // groups, 1)), _MOST)
    return [scale], Launch(
        _tensor_scale_kernel,
        (groups,),
        (maxima, scale, count, ends, 1 if ends is None else maxima.shape[1]),
        dict(GROUPED=ends is not None, SIZE=size, num_warps=max(size // 256, 1)),
    )


_nvfp4_tensor_scale = register_op("nvfp4_tensor_scale(Tensor maxima, Tensor? ends) -> Tensor[]", _scale_launch)


def nvfp4_tensor_scale(maxima: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor scale of a matrix, fp32 []: that of ``reference.nvfp4.power_of_two_tensor_scale``.

    With ``ends``, return the scale of each group of rows, fp32 [G]. Maxima beyond the last end are not read.

    Args:
        maxima: fp32, any shape: largest magnitudes of parts of the matrix (``nvfp4_amax``). NaN and infinity make the
            scale NaN and infinity. No maxima stand for a matrix of zeros. With ``ends``, [strips of 16 rows, any].
        ends: int32 [G], the end of every group of rows, multiples of 16.
    """
    (scales,) = _nvfp4_tensor_scale(*contiguous(maxima, ends))
    return scales if ends is not None else scales.view(())
