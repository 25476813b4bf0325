"""Stochastic rounding to NVFP4, by hand for given bits and on average for random ones.

The suite runs these once more with the other release of the supported range (marker ``torchao``).
"""

import math

import pytest
import torch

from mxtrain.formats.nvfp4 import RANGE
from mxtrain.formats.nvfp4.reference import cast, dequantize
from tests.support.nvfp4_blocks import E2M1, block, draw_bits, same_bits

INF = float("inf")


def rounded(value: float, bits: int) -> float:
    """``value`` as the second element of a block of scale one."""
    x = block(6.0, value)
    codes, scales = cast(x, 1.0, torch.full(x.shape, bits))
    assert scales.item() == 1
    return dequantize(codes, scales)[0, 1].item()


def neighbors(value: float) -> tuple[float, float]:
    low = max(v for v in E2M1 if v <= abs(value))
    high = min(v for v in E2M1 if v >= abs(value))
    return math.copysign(low, value), math.copysign(high, value)


def test_the_decision_by_hand():
    """With t the fraction in units of 2^-16: bits from 2^16 - t on give the larger neighbor, t of 2^16 cases."""
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
            low, high = neighbors(value)
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


def test_stochastic_rounding_is_unbiased():
    """The mean of many draws lies within three standard errors of every element."""
    x = torch.cat([block(6.0, *torch.linspace(-5.9, 5.9, 15).tolist()), block(6.0, *[0.01 * i for i in range(15)])])
    draws = 20_000
    many = x.expand(draws, -1, -1)
    mean = dequantize(*cast(many, 1.0, draw_bits(*many.shape, seed=1))).double().mean(0)
    for value, got in zip(x.flatten().tolist(), mean.flatten().tolist()):
        low, high = neighbors(value)
        standard_error = math.sqrt(abs(value - low) * abs(high - value) / draws)
        assert abs(got - value) <= 3 * standard_error, value
