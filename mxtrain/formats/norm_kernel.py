"""MXNorm of every row and its cast to MXFP8 or NVFP4: one read of x, one write of the result.

The block maxima that the scales need also give the RMS estimate, so a row is normalized and cast while registers hold
it. A row too long for that is read twice, the second time mostly from the L2 cache. NVFP4's tensor scale is given:
MXNorm's output is bounded (``formats.nvfp4.static_tensor_scale``), so the cast needs no maximum over the tensor.

Bytes per row of D elements: 2 D or 4 D read; 4 (rho) and 2 D (image) written, or D + D/32 (MXFP8's codes and scales),
or D/2 + D/16 (NVFP4's).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import (
    as_bytes,
    block_amax,
    empty_cast,
    flat,
    magnitude_bits,
    rounded,
    scale_offset,
)
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mxfp8.arithmetic import STORAGE as MXFP8_STORAGE
from mxtrain.formats.mxfp8.arithmetic import (
    e4m3_codes,
    e4m3_image,
    inverse_scale,
    rounded_amax,
    scale_code,
    scale_value,
)
from mxtrain.formats.nvfp4.arithmetic import STORAGE as NVFP4_STORAGE
from mxtrain.formats.nvfp4.arithmetic import (
    amax_across,
    eighths,
    image_of,
    inverse_of,
    multiplier,
    pack_nearest_words,
    round_to_nearest,
    scale_of_block,
)
from mxtrain.formats.recipe import Recipe
from mxtrain.launch.device import (
    MAX_PERSISTENT_COLUMNS,
    cdiv,
    check_row_length,
    converts_fp4,
    converts_fp8,
    next_power_of_2,
)
from mxtrain.launch.launch import Launch, contiguous, register_op


@triton.jit
def _locate(
    row, rows, first_block, blocks,
    PIECE: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Locate BLOCKS blocks of each row: block [K], offsets [R, K, B / PIECES], and masks [R, K] and [R, K, 1].

    The offsets are those of one of the PIECES into which each block of B elements is split.
    """
    block = first_block + tl.arange(0, BLOCKS)
    element = PIECE * (BLOCK // PIECES) + tl.arange(0, BLOCK // PIECES)
    offsets = (row * (blocks * BLOCK))[:, None, None] + (block * BLOCK)[None, :, None] + element[None, None, :]
    block_mask = (row < rows)[:, None] & (block < blocks)[None, :]
    return block, offsets, block_mask, block_mask[:, :, None]


@triton.jit
def _load(
    x_ptr, residual_ptr, row, rows, first_block, blocks,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Load BLOCKS blocks of each row as they are stored: (x, residual) of each piece; (x, x) without a residual."""
    pieces = ()
    for i in tl.static_range(PIECES):
        _, offsets, _, mask = _locate(row, rows, first_block, blocks, i, PIECES, BLOCKS, BLOCK)
        x = tl.load(x_ptr + offsets, mask=mask, other=0.0)
        if RESIDUAL:
            pieces = pieces + ((x, tl.load(residual_ptr + offsets, mask=mask, other=0.0)),)
        else:
            pieces = pieces + ((x, x),)
    return pieces


@triton.jit
def _piece(
    loaded, total_ptr, row, rows, first_block, blocks, PIECE: tl.constexpr, STORE: tl.constexpr,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x, or x + residual rounded to the dtype of x, as fp32.  loaded: from ``_load``.  STORE: store that sum."""
    x = loaded[PIECE][0].to(tl.float32)
    if RESIDUAL:
        x += loaded[PIECE][1].to(tl.float32)
        total = rounded(x, loaded[PIECE][0].dtype)
        if STORE:
            _, offsets, _, mask = _locate(row, rows, first_block, blocks, PIECE, PIECES, BLOCKS, BLOCK)
            tl.store(total_ptr + offsets, total, mask=mask)
        x = total.to(tl.float32)
    return x


@triton.jit
def _blocks_of(
    loaded, total_ptr, row, rows, first_block, blocks, STORE: tl.constexpr,
    RESIDUAL: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return the blocks that ``_load`` loaded, [ROWS, BLOCKS, BLOCK], and their largest magnitudes [ROWS, BLOCKS].

    Blocks in two pieces are returned as two tuples of eight tensors [ROWS, BLOCKS].
    """
    x = _piece(loaded, total_ptr, row, rows, first_block, blocks, 0, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK)
    if PIECES == 1:
        return x, block_amax(x, 2)
    else:
        first = eighths(x)
        x = _piece(loaded, total_ptr, row, rows, first_block, blocks, 1, STORE, RESIDUAL, PIECES, BLOCKS, BLOCK)
        second = eighths(x)
        return (first, second), amax_across(first + second).to(tl.float32, bitcast=True)


@triton.jit
def _block_sums(x, amax, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, PIECES: tl.constexpr):
    """Sum of x^2 ("exact"), or the maximum to the power P, of each block in fp64.  x: from ``_blocks_of``

    A row has one term per block, so fp64 costs nothing, and rho does not depend on the order of their sum.
    """
    if ESTIMATOR == "exact":
        # Squares of large and small numbers leave the range of fp32. A power of two brings the block's maximum near 1.
        exponent = tl.minimum(tl.maximum(magnitude_bits(amax) >> 23, 1), 253)
        down = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
        up = (exponent << 23).to(tl.float32, bitcast=True).to(tl.float64)
        if PIECES == 2:
            squares = tl.zeros(amax.shape, tl.float32)
            for i in tl.static_range(2):
                eight = tl.zeros(amax.shape, tl.float32)
                for j in tl.static_range(8):
                    scaled = x[i][j] * down
                    eight += scaled * scaled
                squares += eight
        else:
            scaled = x * down[:, :, None]
            squares = tl.sum(scaled * scaled, 2)
        terms = squares.to(tl.float64) * (up * up)
    else:
        if ESTIMATOR == "post_round":
            amax = rounded_amax(amax, RCEIL)
        terms = amax.to(tl.float64)
        if P == 2:
            terms *= terms
    return terms


@triton.jit
def _inverse_rms(row_sum, eps, FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr):
    """rho = 1 / sqrt(r^2 + eps) in fp32. FACTOR turns the sum over a row into r^2, or into r for P = 1."""
    mean_square = row_sum * FACTOR
    if P == 1 and ESTIMATOR != "exact":
        mean_square *= mean_square
    # Graphs that launch this kernel give numbers as fp64.
    return (1.0 / tl.sqrt(mean_square + tl.cast(eps, tl.float32))).to(tl.float32)


@triton.jit
def _store_mxfp8(
    x, amax, rho, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Cast x * rho and store it.  x, amax: from ``_blocks_of``; rho, row [ROWS]"""
    block, offsets, block_mask, mask = _locate(row, rows, first_block, blocks, 0, 1, BLOCKS, 32)
    # fp32 multiplication is monotonic, so this is exactly the largest |x * rho| of the block.
    code = scale_code(amax * rho[:, None], RCEIL)
    y = x * rho[:, None, None] * inverse_scale(code, RCEIL)[:, :, None]
    if FORM == "image":
        tl.store(data_ptr + offsets, e4m3_image(y, scale_value(code)[:, :, None], HARDWARE), mask=mask)
    else:
        tl.store(data_ptr + offsets, e4m3_codes(y, HARDWARE), mask=mask)
        scale_offsets = scale_offset(row[:, None], block[None, :], blocks, FORM)
        tl.store(scales_ptr + scale_offsets, code.to(tl.uint8), mask=block_mask)


@triton.jit
def _store_nvfp4(
    x, amax, rho, tensor_scale, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """As ``_store_mxfp8``, to nearest."""
    block, offsets, block_mask, mask = _locate(row, rows, first_block, blocks, 0, 1, BLOCKS, 16)
    tensor_scale = tl.cast(tensor_scale, tl.float32)
    inverse = inverse_of(tensor_scale)
    rho = rho[:, None]
    code, scale = scale_of_block(amax * rho, inverse)
    factor = multiplier(scale, inverse)
    if FORM == "image":
        value = round_to_nearest(x * rho[:, :, None] * factor[:, :, None])
        tl.store(data_ptr + offsets, image_of(value, scale[:, :, None], tensor_scale), mask=mask)
    else:
        first = pack_nearest_words(x[0], rho, factor, HARDWARE)
        second = pack_nearest_words(x[1], rho, factor, HARDWARE)
        words = tl.reshape(tl.join(first, second), (amax.shape[0], 2 * BLOCKS))
        word = 2 * first_block + tl.arange(0, 2 * BLOCKS)
        word_offsets = (row * (blocks * 2))[:, None] + word[None, :]
        word_mask = (row < rows)[:, None] & (word < 2 * blocks)[None, :]
        tl.store(data_ptr.to(tl.pointer_type(tl.int32)) + word_offsets, words, mask=word_mask)
        scale_offsets = scale_offset(row[:, None], block[None, :], blocks, FORM)
        tl.store(scales_ptr + scale_offsets, code, mask=block_mask)


@triton.jit
def _store_cast(
    x, amax, rho, tensor_scale, row, rows, first_block, blocks, data_ptr, scales_ptr,
    FORM: tl.constexpr, RCEIL: tl.constexpr, HARDWARE: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if BLOCK == 32:
        _store_mxfp8(
            x, amax, rho, row, rows, first_block, blocks, data_ptr, scales_ptr, FORM, RCEIL, HARDWARE, BLOCKS
        )  # fmt: skip
    else:
        _store_nvfp4(
            x, amax, rho, tensor_scale, row, rows, first_block, blocks, data_ptr, scales_ptr, FORM, HARDWARE, BLOCKS
        )  # fmt: skip


@triton.jit
def _mxnorm_cast_kernel(
    x_ptr, residual_ptr, total_ptr, data_ptr, scales_ptr, rho_ptr, rows, blocks, eps, tensor_scale,
    FACTOR: tl.constexpr, P: tl.constexpr, ESTIMATOR: tl.constexpr, RCEIL: tl.constexpr, FORM: tl.constexpr,
    RESIDUAL: tl.constexpr, HARDWARE: tl.constexpr, PERSISTENT: tl.constexpr, ROWS: tl.constexpr,
    PARTS: tl.constexpr, PIECES: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """rho of ROWS rows, and the cast of x * rho. BLOCK = 32 casts to MXFP8, BLOCK = 16 to NVFP4.

    A tensor in a kernel has a power of two of elements, so a row of 24 blocks is held as three PARTS of BLOCKS = 8.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS).to(tl.int64)
    sums = tl.zeros((ROWS, BLOCKS), tl.float64)
    if PERSISTENT:
        # All loads come before the first store, across which the compiler moves no load. With a residual, NVFP4 codes
        # take 136 instead of 149 us at 32768 x 2048.
        loaded = ()
        for i in tl.static_range(PARTS):
            loaded = loaded + (
                _load(x_ptr, residual_ptr, row, rows, i * BLOCKS, blocks, RESIDUAL, PIECES, BLOCKS, BLOCK),
            )
        parts = ()
        for i in tl.static_range(PARTS):
            x, amax = _blocks_of(
                loaded[i], total_ptr, row, rows, i * BLOCKS, blocks, True, RESIDUAL, PIECES, BLOCKS, BLOCK
            )
            sums += _block_sums(x, amax, P, ESTIMATOR, RCEIL, PIECES)
            parts = parts + ((x, amax),)
        rho = _inverse_rms(tl.sum(sums, 1), eps, FACTOR, P, ESTIMATOR)
        for i in tl.static_range(PARTS):
            x, amax = parts[i]
            _store_cast(
                x, amax, rho, tensor_scale, row, rows, i * BLOCKS, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE, BLOCKS, BLOCK,
            )  # fmt: skip
    else:
        for first in range(0, blocks, BLOCKS):
            loaded = _load(x_ptr, residual_ptr, row, rows, first, blocks, RESIDUAL, PIECES, BLOCKS, BLOCK)
            x, amax = _blocks_of(loaded, total_ptr, row, rows, first, blocks, False, RESIDUAL, PIECES, BLOCKS, BLOCK)
            sums += _block_sums(x, amax, P, ESTIMATOR, RCEIL, PIECES)
        rho = _inverse_rms(tl.sum(sums, 1), eps, FACTOR, P, ESTIMATOR)
        for first in range(0, blocks, BLOCKS):
            loaded = _load(x_ptr, residual_ptr, row, rows, first, blocks, RESIDUAL, PIECES, BLOCKS, BLOCK)
            x, amax = _blocks_of(loaded, total_ptr, row, rows, first, blocks, True, RESIDUAL, PIECES, BLOCKS, BLOCK)
            _store_cast(
                x, amax, rho, tensor_scale, row, rows, first, blocks, data_ptr, scales_ptr,
                FORM, RCEIL, HARDWARE, BLOCKS, BLOCK,
            )  # fmt: skip
    tl.store(rho_ptr + row, rho, mask=row < rows)


class RowTile(NamedTuple):
    """The part of the matrix that one program holds at a time.

    Attributes:
        persistent: the program holds whole rows. Otherwise it walks along them twice.
        rows: rows per program.
        parts: tensors that hold a row.
        columns: elements per row of one of them, a power of two.
        warps: warps per program.
    """

    persistent: bool
    rows: int
    parts: int
    columns: int
    warps: int


# (image, exact RMS) -> elements per thread at most. Much is computed once per thread, but an SM has registers for few
# such threads. With the exact RMS more threads are faster: 85 instead of 108 us at 16384 x 5120.
_ELEMENTS_PER_THREAD = {(False, False): 112, (False, True): 80, (True, False): 96, (True, True): 64}


def row_tile(columns: int, form: str, estimator: str) -> RowTile:
    """Return the tile for rows of ``columns`` elements, chosen by times on an H200.

    A row that fills five or six eighths of a power of two is held as five or three parts. 16384 rows of 5120 elements,
    cast to MXFP8 images, take 86 us like this, and 102 as a tile of 4096 and one of 1024. Seven parts are faster than
    one masked tile for NVFP4 codes only (11 %), and slower with the exact RMS (12 %).
    """
    if columns > MAX_PERSISTENT_COLUMNS:
        return RowTile(False, 1, 1, 8192, 8)
    image, exact = form == "image", estimator == "exact"
    filled = cdiv(columns, 32) * 32
    whole = next_power_of_2(filled)
    eighths = cdiv(filled * 8, whole)
    parts, part = {5: (5, whole // 8), 6: (3, whole // 4)}.get(eighths, (1, whole))
    elements = 2048 if parts == 1 else 512
    if image and exact:
        # 67 instead of 75 us at 65536 x 1024, 66 instead of 71 at 52224 x 1280.
        elements //= 2
        if parts == 1 and whole > 4096:
            # 70 instead of 81 us at 4096 x 16384, with a residual 136 instead of 172.
            parts, part = 2, whole // 2
    rows = max(1, elements // part)
    if parts == 1 and image:
        return RowTile(True, rows, parts, part, 8 if whole > 8192 else max(1, min(4, whole // 1024)))
    most = _ELEMENTS_PER_THREAD[image, exact]
    return RowTile(True, rows, parts, part, next_power_of_2(cdiv(rows * parts * part, 32 * most)))


def _launch(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    p: int,
    estimator: str,
    eps: float,
    constant: float,
    form: str,
    scale_rounding: str | None,
    tensor_scale: float | None,
) -> tuple[list[torch.Tensor], Launch | None]:
    """Allocate the results of an MXNorm cast, to NVFP4 with a tensor scale; return them with the launch for them."""
    if tensor_scale is None:
        storage, hardware = MXFP8_STORAGE, converts_fp8(x)
    else:
        storage, hardware = NVFP4_STORAGE, converts_fp4(x)
    rows, columns = x.shape
    data, scales = empty_cast(storage, rows, columns, form, x.device)
    rho = torch.empty(rows, dtype=torch.float32, device=x.device)
    total = None if residual is None else torch.empty_like(x)
    results = flat(data, scales, rho, total)
    if x.numel() == 0:
        return results, None
    block, tile = storage.block_size, row_tile(columns, form, estimator)
    return results, Launch(
        _mxnorm_cast_kernel,
        (cdiv(rows, tile.rows),),
        (
            x, residual, total, as_bytes(data), as_bytes(scales), rho, rows, columns // block, eps, tensor_scale,
        ),
        dict(
            FACTOR=1.0 / columns if estimator == "exact" else 1.0 / (columns // block * constant**p),
            P=p, ESTIMATOR=estimator, RCEIL=scale_rounding == "rceil", FORM=form, RESIDUAL=residual is not None,
            HARDWARE=hardware, PERSISTENT=tile.persistent, ROWS=tile.rows, PARTS=tile.parts,
            # A thread holds whole blocks of NVFP4 codes, eight elements at a time, and computes what belongs to a block
            # only once. Of an image it holds half a block, so that neighbouring threads store side by side.
            PIECES=2 if storage is NVFP4_STORAGE and form != "image" else 1,
            BLOCKS=tile.columns // block, BLOCK=block, num_warps=tile.warps,
        ),
    )  # fmt: skip


_mxnorm_cast = register_op(
    "mxnorm_cast(Tensor x, Tensor? residual, int p, str estimator, float eps, float constant, str form,"
    " str? scale_rounding, float? tensor_scale) -> Tensor[]",
    _launch,
)


class MXNormCast(NamedTuple):
    """Result of ``mxnorm_cast`` and ``nvfp4_norm``.

    Attributes:
        data: codes, or the image.
        scales: the scales of the codes. None for an image.
        rho: the inverse RMS of every row, fp32.
        total: x + residual in the dtype of x. None without a residual.
    """

    data: torch.Tensor
    scales: torch.Tensor | None
    rho: torch.Tensor
    total: torch.Tensor | None


def mxnorm_cast(
    x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, form: str = "codes", residual: torch.Tensor | None = None
) -> MXNormCast:
    """Return rho of every row of x, or of x + residual, and the MXFP8 cast of x * rho along the row.

    Args:
        x: bf16 or fp32 [T, D], D a multiple of 32 and at most 65536.
        estimate: how the RMS is estimated, over blocks of 32.
        recipe: an MXFP8 recipe; gives the scale rounding.
        form: "codes" (float8_e4m3fn [T, D] and float8_e8m0fnu [T, D / 32]), "blocked" (the same codes, scales flat in
            the 128x4 layout, padding zero) or "image" (the bf16 values [T, D] that codes and scales stand for).
        residual: bf16 or fp32 [T, D], added to x first; the sum is rounded to the dtype of x.

    Raises:
        ValueError: for longer rows.
    """
    return _call(x, residual, estimate, form, recipe.scale_rounding, None)


def nvfp4_norm(
    x: torch.Tensor,
    estimate: RMSEstimate,
    tensor_scale: float,
    form: str = "codes",
    residual: torch.Tensor | None = None,
) -> MXNormCast:
    """Return rho of every row of x, or of x + residual, and the NVFP4 cast of x * rho along the row, to nearest.

    Args:
        x, residual: as for ``mxnorm_cast``, D a multiple of 16.
        estimate: "pre_round" or "exact", over blocks of 16. (The block scales that "post_round" reads would depend on
            the norm itself.)
        tensor_scale: a power of two, at least ``TENSOR_SCALE_MIN``. Elements beyond
            6 * 448 * tensor_scale saturate, and with ``formats.nvfp4.static_tensor_scale`` none does.
        form: "codes" (uint8 [T, D / 2], two elements a byte, and float8_e4m3fn [T, D / 16]), "blocked" (the same codes,
            scales flat in the 128x4 layout, padding zero) or "image" (bf16 [T, D]: element * block scale *
            tensor_scale, exact).

    Raises:
        ValueError: for longer rows.
    """
    return _call(x, residual, estimate, form, None, float(tensor_scale))


def _call(x, residual, estimate: RMSEstimate, form: str, scale_rounding, tensor_scale) -> MXNormCast:
    check_row_length(x)
    settings = estimate.p, estimate.estimator, estimate.eps, estimate.constant, form, scale_rounding, tensor_scale
    data, *others = _mxnorm_cast(*contiguous(x, residual), *settings)
    if form == "image":
        others = [None, *others]
    return MXNormCast(data, others[0], others[1], None if residual is None else others[2])
