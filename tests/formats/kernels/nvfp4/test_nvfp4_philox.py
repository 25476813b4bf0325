"""Philox of Triton and of our kernels returns the bits of the reference."""

import torch
import triton
import triton.language as tl

from mxtrain.formats.nvfp4.arithmetic import philox as kernel_philox
from mxtrain.rng.philox import philox, rounding_words
from mxtrain.rng.seeds import rounding_key
from tests.support.kernel_checks import kernel_tests

pytestmark = kernel_tests

KEYS = [0, 1, 2**32, 2**63 - 1, rounding_key(0, "layers.0.attention.wq")]


@triton.jit
def _randint4x_kernel(out_ptr, offset_ptr, key, N: tl.constexpr):
    i = tl.arange(0, N)
    words = tl.randint4x(key, tl.load(offset_ptr + i))
    for j in tl.static_range(4):
        tl.store(out_ptr + 4 * i + j, words[j].to(tl.int64) & 0xFFFFFFFF)


def test_words_of_an_offset():
    offsets = torch.cat([torch.arange(14), torch.tensor([2**32 - 1, 2**32, 2**33 + 1, 2**62 + 12345, 2**63 - 1])])
    offsets = torch.nn.functional.pad(offsets, (0, 32 - offsets.numel()))
    for key in KEYS:
        got = torch.empty(32, 4, dtype=torch.int64)
        _randint4x_kernel[(1,)](got, offsets, key, 32)
        assert torch.equal(got, torch.stack(philox(key, offsets & 0xFFFFFFFF, offsets >> 32, 0, 0), 1))


@triton.jit
def _rounding_words_kernel(out_ptr, key_ptr, rows, columns, rank, microbatch, ROWS: tl.constexpr, FOURS: tl.constexpr):
    """Fill a tile of [ROWS, 4 * FOURS] elements, addressed as in ``rounding_words``."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    four = tl.program_id(1) * FOURS + tl.arange(0, FOURS)[None, :]
    # The index of an element overflows 32 bits.
    c0 = (row.to(tl.int64) * (columns // 4) + four).to(tl.uint32)
    key, step = tl.load(key_ptr), tl.load(key_ptr + 1)
    words = kernel_philox(key, c0, microbatch.to(tl.uint32), step.to(tl.uint32), rank.to(tl.uint32))
    out = out_ptr + row * columns + four * 4
    mask = (row < rows) & (four * 4 < columns)
    for j in tl.static_range(4):
        tl.store(out + j, words[j].to(tl.int64), mask=mask)


def test_bits_of_a_matrix_whatever_the_tiles():
    rows, columns, step, rank, microbatch = 19, 48, 2**32 - 2, 3, 2
    for key in KEYS:
        want = rounding_words(rows, columns, key, step, rank, microbatch)
        for tile in ((16, 4), (4, 8)):
            got = torch.empty_like(want)
            grid = (triton.cdiv(rows, tile[0]), triton.cdiv(columns, 4 * tile[1]))
            _rounding_words_kernel[grid](got, torch.tensor([key, step]), rows, columns, rank, microbatch, *tile)
            assert torch.equal(got, want)
