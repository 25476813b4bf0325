"""Casts of weights in tiles of 32 x 32 that share a scale.

Hashes, codes and scales of whole tiles are those of TransformerEngine's and torchao's references, run on a CPU.
"""

from hashlib import sha256

import pytest
import torch
from torch.nn.functional import pad

from mxtrain.formats.mx.reference import cast, dequantize, image
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.recipe import SCALE_ROUNDINGS
from tests.support.casts import weight_of_tiles

GAIN = torch.ones(96)
GAIN[5], GAIN[40] = 9, 0.25


def cast_tiles(w: torch.Tensor, rounding="rceil") -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as bytes."""
    codes, scales = cast(w, MXFP8, rounding, tiles=True)
    return codes.view(torch.uint8), scales.view(torch.uint8)


def ugly(rows: int, columns: int, dtype=torch.float32) -> torch.Tensor:
    """Blocks of sizes from 2^-40 to 2^40, and tiles with an infinity, a NaN and zeros."""
    generator = torch.Generator().manual_seed(rows)
    exponents = torch.randint(-40, 41, (rows, columns), generator=generator)[:, ::32].repeat_interleave(32, 1)
    w = torch.randn(rows, columns, generator=generator) * 2.0 ** exponents[:, :columns]
    w[0, 0], w[-1, -1], w[:32, 32:64] = float("inf"), float("nan"), 0
    return w.to(dtype)


def digest(codes: torch.Tensor) -> str:
    return sha256(codes.contiguous().numpy().tobytes()).hexdigest()[:16]


SCALES = [[120, 115, 110], [117, 112, 107]]


@pytest.mark.parametrize(
    ("w", "columns", "expected", "sha"),
    [
        (weight_of_tiles(64, 96), 96, SCALES, "6d231acedb780d07"),
        (pad(weight_of_tiles(40, 80), (0, 16)), 80, SCALES, "60127264bbb7a175"),
        (weight_of_tiles(64, 96) * GAIN, 96, [[123, 115, 110], [120, 112, 107]], "e827fbe3a63562d7"),
        (weight_of_tiles(64, 96) * (1 + 2**-9), 96, None, "0ebb790f978ec3a0"),
    ],
    ids=["whole", "padded", "gain", "gain of 1 + w"],
)
def test_scales_and_codes_of_other_references(w, columns, expected, sha):
    codes, scales = cast_tiles(w)
    assert digest(codes[:, :columns]) == sha
    if expected:
        for rows, want in zip(scales.split(32), expected):
            assert (rows == torch.tensor(want)).all()


def test_codes_by_hand():
    codes, _ = cast_tiles(weight_of_tiles(64, 96))
    assert bytes(codes[0, :6].tolist()).hex() == "f8e472f166f7"
    assert bytes(codes[40, 70:76].tolist()).hex() == "f36bf26df16f"


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
def test_values_that_are_cast_again_stay(rounding):
    """So mode "native" may cast the values that FSDP gathers."""
    once = image(ugly(64, 96), MXFP8, rounding, 1, torch.bfloat16, tiles=True)
    again = image(once, MXFP8, rounding, 1, torch.bfloat16, tiles=True)
    assert torch.equal(once.nan_to_num(7.0), again.nan_to_num(7.0)) and once.isfinite().any()


def test_a_gain_after_the_cast_is_another_matrix():
    w = weight_of_tiles(64, 96)
    before, after = (image(m, MXFP8, "rceil", 1, torch.float32, tiles=True) for m in (w * GAIN, w))
    assert (before != after * GAIN).sum() == 58


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tile_has_the_largest_scale_of_its_blocks_in_either_orientation(rounding, dtype):
    w = ugly(64, 96, dtype=dtype)
    codes, scales = cast_tiles(w, rounding)
    of_blocks = cast(w, MXFP8, rounding)[1].view(torch.uint8)
    for tile, blocks in zip(scales.split(32), of_blocks.split(32)):
        assert (tile == blocks.amax(0)).all() and (tile != blocks).any()
    transposed, transposed_scales = cast_tiles(w.t(), rounding)
    is_number = torch.repeat_interleave(scales != 255, 32, 1)
    assert torch.equal(transposed_scales[::32].t(), scales[::32])
    assert torch.equal(transposed.t()[is_number], codes[is_number])


@pytest.mark.parametrize("shape", [(1, 32), (33, 32), (64, 96), (40, 80)])
def test_images_of_both_orientations_are_one(shape):
    """Zeros pad incomplete tiles, which changes nothing."""
    rows, columns = shape
    w = ugly(rows, columns)
    whole = pad(w, (0, -columns % 32, 0, -rows % 32))
    want = image(whole, MXFP8, "rceil", 1, torch.float32, tiles=True)[:rows, :columns]
    got = image(w, MXFP8, "rceil", 0, torch.float32, tiles=True)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    codes, scales = cast(pad(w, (0, -columns % 32)), MXFP8, "rceil", tiles=True)
    torch.testing.assert_close(dequantize(codes, scales, MXFP8)[:, :columns], want, rtol=0, atol=0, equal_nan=True)
