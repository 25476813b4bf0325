"""Four over six in plain PyTorch, against codes and scales that TransformerEngine 2.20.2's reference computed.

Exceptions, worked out from the definition only: the block that takes 4 for the squares of its errors and 6 for their
magnitudes, and the scale that is a power of two.
"""

import hashlib

import pytest
import torch

from mxtrain.formats.e2m1 import encode, pack
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, RANGE
from mxtrain.formats.nvfp4.reference import cast_four_over_six, dequantize, dequantize_by_amax
from tests.support.nvfp4_blocks import draw

RISING = [k / 4 for k in range(1, 17)]
TIE = [6.0, 3, -3, 0] * 4
MIXED = [-1.75, 0, 4.25, -5, -3.5, 2.25, 1, 0, -6, -0.5, -2, 5.75, 1.25, -5.75, 6, 4.25]


@pytest.mark.parametrize(
    ("block", "error", "top", "amax", "scale", "codes"),
    [
        (RISING, "mae", FOUR_OVER_SIX_RANGE, 1536, 0x38, "1022324444556566"),
        (RISING, "mae", RANGE, 1536, 0x3E, "1022324444556566"),
        (RISING, "mae", FOUR_OVER_SIX_RANGE, 1000, 0x3C, "1122334454556566"),
        (RISING, "mae", RANGE, 1000, 0x3E, "2132445565667677"),
        ([5.0] * 15 + [6], "mae", FOUR_OVER_SIX_RANGE, 1536, 0x3C, "5555555555555565"),
        (TIE, "mae", FOUR_OVER_SIX_RANGE, 1536, 0x38, "570D570D570D570D"),
        (TIE, "mse", FOUR_OVER_SIX_RANGE, 1536, 0x38, "570D570D570D570D"),
        (MIXED, "mae", FOUR_OVER_SIX_RANGE, 1536, 0x38, "0CE64E029F7CF267"),
        (MIXED, "mse", FOUR_OVER_SIX_RANGE, 1536, 0x3C, "0AD53C019E6BE256"),
        ([0.0] * 16, "mae", FOUR_OVER_SIX_RANGE, 1536, 0x00, "0000000000000000"),
    ],
)
def test_a_block_takes_four_or_six(block, error, top, amax, scale, codes):
    got, scales = cast_four_over_six(torch.tensor([block]), torch.tensor(float(amax)), error, top=top)
    assert (scales.view(torch.uint8).item(), got.numpy().tobytes().hex().upper()) == (scale, codes)


def many_scales() -> torch.Tensor:
    """64 x 160 numbers of 20 sizes."""
    i, j = torch.arange(64)[:, None], torch.arange(160)
    n = (37 * i + 101 * j + 7 * i * j) % 251 - 125
    return n * 2.0 ** (-6 - 3 * (i // 16 % 4) - (j // 16 % 5))


X = many_scales()
AMAX = X.abs().amax()


def hashes(codes: torch.Tensor, scales: torch.Tensor) -> tuple[str, ...]:
    return tuple(hashlib.sha256(t.view(torch.uint8).numpy().tobytes()).hexdigest()[:16] for t in (codes, scales))


@pytest.mark.parametrize(
    ("amax", "settings", "expected"),
    [
        (AMAX, {}, ("34397c9eb53fd333", "5931bcd06789dac9")),
        (AMAX, dict(error="mse"), ("2650de1f4c52d453", "7f047a487e567530")),
        (AMAX, dict(tiles=True), ("7450efcf08070092", "f3a8b8a6831d573c")),
        (X.abs().amax(1, keepdim=True), {}, ("9c3adccd4736c032", "16aa9d9513c19b03")),
        (AMAX, dict(top=RANGE), ("d479f2de6b9be599", "45d445f6c1190a9d")),
        (2.0 ** (AMAX / 1536).log2().ceil() * 1536, {}, ("43615abd495ff9df", "1be6667a4468c151")),
    ],
    ids=["mae", "mse", "tiles", "rows", "range of 448", "power of two"],
)
def test_a_matrix_of_many_scales(amax, settings, expected):
    codes, scales = cast_four_over_six(X, amax, **settings)
    assert hashes(codes, scales) == expected
    values = dequantize(codes, scales, amax / settings.get("top", FOUR_OVER_SIX_RANGE))
    assert (values - X).abs().sum() < 0.1 * X.abs().sum()


@pytest.mark.parametrize(
    ("amax", "row", "first", "expected"),
    [
        (AMAX, 0, "BFFA BEA7 3FA7 BFA7 3EFA BFFA", "94a8f5cce9eb695e"),
        (X.abs().amax(1, keepdim=True), 1, "BFBC 3E7A BFFA BE7A 3FBC BF3C", "1b9778ae01b81db4"),
    ],
    ids=["matrix", "rows"],
)
def test_values_in_bf16_are_transformer_engines(amax, row, first, expected):
    values = dequantize_by_amax(*cast_four_over_six(X, amax), amax, torch.bfloat16).view(torch.int16)
    assert [f"{bits & 0xFFFF:04X}" for bits in values[row, :6].tolist()] == first.split()
    assert hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16] == expected


def test_390_of_640_blocks_take_four_and_no_block_does_in_transformer_engines_plain_cast():
    blocks = X.view(64, 10, 16)
    amax, (_, chosen) = blocks.abs().amax(-1), cast_four_over_six(X, AMAX)
    six = (amax / 6 * (FOUR_OVER_SIX_RANGE / AMAX)).to(torch.float8_e4m3fn)
    assert (chosen.float() != six.float()).sum() == 390
    up = RANGE / AMAX
    scales = (amax * (up * (1 / torch.tensor(6.0)))).clamp(max=448).to(torch.float8_e4m3fn)
    factor = 1 / (scales.float() * (1 / up))
    codes = pack(encode((blocks * factor.unsqueeze(-1)).view_as(X)))
    assert hashes(codes, scales) == ("c95b7d95407366d6", "3185cb085a60243e")


def test_tiles_pad_their_rows_and_a_matrix_of_zeros_is_zeros():
    x = draw(40, 32, seed=1)
    codes, scales = cast_four_over_six(x, x.abs().amax(), tiles=True)
    padded = cast_four_over_six(torch.cat([x, x.new_zeros(8, 32)]), x.abs().amax(), tiles=True)
    assert torch.equal(codes, padded[0][:40]) and torch.equal(scales.float(), padded[1][:40].float())
    for amax in (0.0, 1.0, float("inf")):
        assert not dequantize(*cast_four_over_six(torch.zeros(16, 32), torch.tensor(amax))).any()
