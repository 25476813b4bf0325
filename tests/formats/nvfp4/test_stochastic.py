"""Stochastic rounding to NVFP4, by hand for given bits and on average for random ones.

The suite runs these once more with the other release of the supported range (marker ``torchao``).
"""

import math

import pytest
import torch

from mxtrain.formats.nvfp4 import RANGE
from mxtrain.formats.nvfp4.reference import cast, dequantize, dynamic_tensor_scale
from tests.support.nvfp4_blocks import E2M1, block, draw, draw_bits, same_bits

INF = float("inf")


def rounded(value: float, bits: int) -> float:
    """``value`` as the second element of a block of scale one."""
    x = block(6.0, value)
    codes, scales = cast(x, 1.0, torch.full(x.shape, bits))
    assert scales.item() == 1
    return dequantize(codes, scales)[0, 1].item()


def neighbours(value: float) -> tuple[float, float]:
    low = max(v for v in E2M1 if v <= abs(value))
    high = min(v for v in E2M1 if v >= abs(value))
    return math.copysign(low, value), math.copysign(high, value)


def test_the_decision_by_hand():
    """With t the fraction in units of 2^-16: bits from 2^16 - t on give the larger neighbour, t of 2^16 cases."""
    smallest = 2.0**-17
    for magnitude in (
        smallest,
        0.1,
        0.25,
        0.4999,
        0.5001,
        0.75,
        1.3,
        1.75,
        1.999,
        2.001,
        2.7,
        3.5,
        3.9,
        4.1,
        5.0,
        5.999,
    ):
        for sign in (1, -1):
            value = sign * torch.tensor(magnitude).item()
            low, high = neighbours(value)
            t = round((value - low) / (high - low) * 2**16)
            assert t > 0, "even the smallest element can be rounded up"
            expected = {0: low, 2**16 - t - 1: low, 2**16 - t: high, 2**16 - 1: high}
            assert {bits: rounded(value, bits) for bits in expected} == expected, value


@pytest.mark.parametrize("bits", [0, 2**15, 2**16 - 1])
def test_bits_change_no_representable_value(bits):
    x = torch.tensor([E2M1 + [-v for v in E2M1]])
    codes, scales = cast(x, 1.0, torch.full(x.shape, bits))
    assert same_bits(codes, cast(x, 1.0)[0]), "negative zero included"
    assert torch.equal(dequantize(codes, scales), x)


@pytest.mark.parametrize("bits", [0, 2**15, 2**16 - 1])
def test_elements_above_the_largest_value_saturate_whatever_the_bits(bits):
    x = block(6.0 * 1.0625, -6.3)  # the scale is rounded down to one
    codes, scales = cast(x, 1.0, torch.full(x.shape, bits))
    assert scales.item() == 1 and dequantize(codes, scales)[0, :2].tolist() == [6.0, -6.0]
    assert dequantize(*cast(block(INF), 1.0, torch.full((1, 16), bits)))[0, 0].item() == RANGE


def elements(codes: torch.Tensor) -> torch.Tensor:
    """[..., D / 2] packed codes to [..., D] positions on the axis of E2M1, -7 to 7."""
    unpacked = torch.stack([codes & 15, codes >> 4], -1).flatten(-2).int()
    return torch.where(unpacked >= 8, 8 - unpacked, unpacked)


@pytest.mark.parametrize("tensor_scale", [None, 1e-9, 1e9])
def test_stochastic_is_at_most_one_step_from_nearest_with_the_same_scales(tensor_scale):
    x = draw(64, 256) * draw(64, 1, seed=1).mul(2).exp()
    tensor_scale = dynamic_tensor_scale(x) if tensor_scale is None else tensor_scale
    nearest, scales = cast(x, tensor_scale)
    stochastic, same = cast(x, tensor_scale, draw_bits(64, 256))
    assert same_bits(scales, same)
    apart = (elements(nearest) - elements(stochastic)).abs()
    assert apart.max() <= 1
    values = dequantize(stochastic, scales)
    assert ((values == 0) | (values.sign() == x.sign())).all()


def test_stochastic_rounding_is_unbiased():
    """The mean of many draws lies within three standard errors of every element."""
    x = torch.cat([block(6.0, *torch.linspace(-5.9, 5.9, 15).tolist()), block(6.0, *[0.01 * i for i in range(15)])])
    draws = 20_000
    many = x.expand(draws, -1, -1)
    mean = dequantize(*cast(many, 1.0, draw_bits(*many.shape, seed=1))).double().mean(0)
    for value, got in zip(x.flatten().tolist(), mean.flatten().tolist()):
        low, high = neighbours(value)
        standard_error = math.sqrt(abs(value - low) * abs(high - value) / draws)
        assert abs(got - value) <= 3 * standard_error, value


def test_a_fraction_is_rounded_to_sixteen_bits_on_either_side():
    """Over all bits, the mean is off by the rounding of the fraction, which has no bias."""
    errors = []
    for value in torch.linspace(0.001, 5.999, 1000).tolist():
        low, high = neighbours(value)
        fraction = (value - low) / (high - low)
        t = round(fraction * 2**16)
        errors.append(t / 2**16 - fraction)
        assert rounded(value, 2**16 - t - 1) == low and (t == 0 or rounded(value, 2**16 - t) == high)
    errors = torch.tensor(errors, dtype=torch.float64)
    assert errors.abs().max() <= 2**-17 and abs(errors.mean()) < 3 * errors.std() / len(errors) ** 0.5


def test_small_gradients_survive_on_average():
    """Rounding to nearest loses elements below half of the smallest step; stochastic rounding keeps their mean."""
    x = torch.full((20_000, 16), 0.02)
    x[:, 0] = 6.0
    assert dequantize(*cast(x, 1.0))[:, 1:].count_nonzero() == 0
    kept = dequantize(*cast(x, 1.0, draw_bits(*x.shape)))[:, 1:].double()
    assert kept.mean().item() == pytest.approx(0.02, abs=3 * kept.std().item() / math.sqrt(kept.numel()))
