"""NVFP4 casts, rounded to nearest, against numbers worked out by hand and against torchao, for the installed release.

The suite runs these once more with the other release of the supported range (marker ``torchao``).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats.nvfp4 import RANGE
from mxtrain.formats.nvfp4.reference import cast, dequantize, dynamic_tensor_scale
from tests.support.nvfp4_blocks import E2M1, block, draw, draw_bits, same_bits, torchao_cast

INF, NAN = float("inf"), float("nan")


# Rounding to nearest


@pytest.mark.parametrize(
    ("amax", "tensor_scale", "expected"),
    [
        (6.0, 1.0, 1.0),
        (-6.0, 1.0, 1.0),
        (6.0 * 1.0625, 1.0, 1.0),  # ties go to the even mantissa
        (6.0 * 1.1875, 1.0, 1.25),
        (6.0 * 1.07, 1.0, 1.125),
        (2688.0, 1.0, 448.0),  # the largest
        (2689.0, 1.0, 448.0),  # beyond: saturated, not NaN
        (3.0e38, 1.0, 448.0),
        (INF, 1.0, 448.0),
        (0.0, 1.0, 2.0**-6),  # the smallest is not zero, and not subnormal
        (2.0**-140, 1.0, 2.0**-6),
        (6.0 * 2.0**-7, 1.0, 2.0**-6),
        (6.0, 0.25, 4.0),
        (6.0, 2.0**20, 2.0**-6),
        (3.0e38, 2.0**120, 36.0),  # of 37.6
    ],
)
def test_block_scales_by_hand(amax, tensor_scale, expected):
    _, scales = cast(block(amax), tensor_scale)
    assert scales.dtype == torch.float8_e4m3fn and scales.float().tolist() == [[expected]]


def test_elements_are_the_nearest_representable_values():
    """With a block maximum of 6 the scale is one, so codes are plain E2M1: every value, midpoint and neighbor."""
    probes = list(E2M1)
    for low, high in zip(E2M1, E2M1[1:]):
        middle = torch.tensor((low + high) / 2)
        probes += [middle.item(), *(torch.nextafter(middle, torch.tensor(to)).item() for to in (0.0, 8.0))]
    for probe in probes:
        for sign in (1, -1):
            x = block(6.0, sign * probe)
            codes, scales = cast(x, 1.0)
            assert scales.item() == 1
            best = min(abs(probe - v) for v in E2M1)
            nearest = [i for i, v in enumerate(E2M1) if abs(probe - v) == best]
            # On a tie the code with an even mantissa wins; consecutive codes alternate.
            expected = E2M1[next(i for i in nearest if len(nearest) == 1 or i % 2 == 0)]
            assert dequantize(codes, scales)[0, 1].item() == sign * expected, probe


def test_two_codes_per_byte_the_first_one_low():
    codes, _ = cast(block(6.0, -0.5, 1.0, -0.0), 1.0)
    assert codes.tolist() == [[0x97, 0x82, 0, 0, 0, 0, 0, 0]]


TENSOR_SCALES = {
    "dynamic": lambda x: dynamic_tensor_scale(x),
    "power of two above": lambda x: 2.0 ** math.ceil(math.log2(dynamic_tensor_scale(x))),
    "far too large": lambda x: dynamic_tensor_scale(x) * 1e6,
    "too small": lambda x: dynamic_tensor_scale(x) * 0.3,
    "one": lambda x: 1.0,
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_identical_to_torchao(dtype):
    for choice in TENSOR_SCALES:
        for spread in (1.0, 1e-30, 1e30):
            check_against_torchao(choice, dtype, spread)


def check_against_torchao(choice, dtype, spread):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor

    x = (draw(65, 160) * draw(65, 1, seed=1).mul(3).exp() * spread).to(dtype)
    x[0], x[1, :32] = 0, 0
    x[2], x[2, 7] = 0, spread  # a single outlier
    x[3] = torch.finfo(torch.float32).tiny / 8  # subnormal
    x[4, ::2] *= 1e-6
    tensor_scale = TENSOR_SCALES[choice](x)
    codes, scales = cast(x, tensor_scale)
    for ours, theirs in zip((codes, scales), torchao_cast(x, tensor_scale)):
        assert same_bits(ours, theirs)
    tensor_scale = torch.as_tensor(tensor_scale)
    theirs = NVFP4Tensor.to_nvfp4(x, per_tensor_scale=tensor_scale)
    assert same_bits(codes, theirs.qdata) and same_bits(scales, theirs.scale)
    assert codes.shape == (65, 80) and scales.shape == (65, 10)
    if dtype == torch.float32:
        torch.testing.assert_close(
            dequantize(codes, scales, tensor_scale), theirs.dequantize(torch.float32), rtol=2**-22, atol=0
        )


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@settings(max_examples=200, deadline=None)
@given(st.lists(finite, min_size=16, max_size=16), st.floats(-100, 100), st.booleans())
def test_any_finite_block(values, exponent, power_of_two):
    x = torch.tensor([values], dtype=torch.float32)
    tensor_scale = torch.tensor(2.0 ** (round(exponent) if power_of_two else exponent))
    codes, scales = cast(x, tensor_scale)
    for ours, theirs in zip((codes, scales), torchao_cast(x, tensor_scale)):
        assert same_bits(ours, theirs)
    step = scales.double() * tensor_scale.double()
    got = dequantize(codes, scales, tensor_scale).double()
    # Within half of E2M1's coarsest distance; elements that saturate give the largest value.
    bounded = x.double().abs() <= 6 * step
    assert ((got - x.double()).abs() <= step * (1 + 2**-20))[bounded].all()
    torch.testing.assert_close(got.abs()[~bounded], (6 * step).expand_as(got)[~bounded], rtol=1e-6, atol=0)


def test_a_block_with_nan_never_dequantizes_to_a_number():
    x = torch.full((1, 32), 3.0)
    x[0, 3] = NAN
    codes, scales = cast(x, 0.5)
    values = dequantize(codes, scales, 0.5)
    assert values[0, :16].isnan().all() and torch.equal(values[0, 16:], x[0, 16:]), "the other block is untouched"
    assert torch.equal(torchao_cast(x, 0.5)[1].float().isnan(), scales.float().isnan())


def test_infinity_saturates_under_a_static_tensor_scale():
    values = dequantize(*cast(block(INF, -INF, 1.0), 0.5), 0.5)
    assert values[0, :3].tolist() == [RANGE / 2, -RANGE / 2, 0.0]


@pytest.mark.parametrize("tensor_scale", [2.0**-8, 0.0031])
def test_values_without_their_tensor_scale_are_exact_in_bf16(tensor_scale):
    x, bits = draw(32, 96) * draw(32, 1, seed=1).mul(2).exp(), draw_bits(32, 96)
    for codes, scales in (cast(x, tensor_scale), cast(x, tensor_scale, bits), cast(x, tensor_scale, tiles=True)):
        wide = dequantize(codes, scales)
        assert torch.equal(dequantize(codes, scales, dtype=torch.bfloat16).float(), wide)
        assert torch.equal(wide * tensor_scale, dequantize(codes, scales, tensor_scale))


# Shapes, dtypes, tracing


def test_no_rows_one_dimension_and_strides():
    for tiles in (False, True):
        codes, scales = cast(torch.empty(0, 64), 1.0, tiles=tiles)
        assert codes.shape == (0, 32) and scales.shape == (0, 4) and dequantize(codes, scales).shape == (0, 64)
    x = draw(64, 48).t()
    for got, expected in zip(cast(x, 2.0**-8), cast(x.contiguous(), 2.0**-8)):
        assert same_bits(got, expected)
    x = draw(2, 3, 32)
    for whole, part in zip(cast(x, 2.0**-8), cast(x[1, 2], 2.0**-8)):
        assert same_bits(whole[1, 2], part)


def test_it_compiles_in_one_graph():
    def run(x, bits):
        dynamic = dynamic_tensor_scale(x)
        return (*cast(x, dynamic, bits), dequantize(*cast(x, 2.0**-8)), *cast(x, dynamic, tiles=True))

    x, bits = draw(32, 48), draw_bits(32, 48)
    torch._dynamo.reset()
    for got, expected in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(x, bits), run(x, bits)):
        assert same_bits(got, expected)
