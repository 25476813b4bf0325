"""NVFP4 casts against numbers worked out by hand and against torchao, for the installed release.

The suite runs these once more with the other release of the supported range (marker ``torchao``).
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats import norm_constant
from mxtrain.recipe import RMSEstimate, get_recipe
from mxtrain.reference.mxnorm import inverse_rms, scale_rows
from mxtrain.reference.nvfp4 import (
    MIN_TENSOR_SCALE,
    RANGE,
    cast,
    cast_tiles,
    dequantize,
    dynamic_tensor_scale,
    image,
    image_tiles,
    power_of_two_tensor_scale,
    static_tensor_scale,
)

pytestmark = pytest.mark.torchao

INF, NAN = float("inf"), float("nan")

# E2M1 from the format's definition: bias 1, one mantissa bit, neither infinity nor NaN.
E2M1 = [0.0, 0.5] + [(1 + m / 2) * 2.0 ** (e - 1) for e in (1, 2, 3) for m in (0, 1)]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw_bits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**16, shape, generator=torch.Generator().manual_seed(seed))


def block(*values: float) -> torch.Tensor:
    return torch.tensor([list(values) + [0.0] * (16 - len(values))], dtype=torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def torchao_cast(x: torch.Tensor, tensor_scale) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of torchao, which returns them the other way round."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, codes = nvfp4_quantize(x, 16, torch.as_tensor(tensor_scale, dtype=torch.float32))
    return codes, scales.reshape(*x.shape[:-1], x.shape[-1] // 16)


# Rounding to nearest


@pytest.mark.parametrize(
    ("amax", "tensor_scale", "expected"),
    [
        (6.0, 1.0, 1.0),
        (-6.0, 1.0, 1.0),
        (6.0 * 1.0625, 1.0, 1.0),  # ties go to the even mantissa
        (6.0 * 1.1875, 1.0, 1.25),
        (6.0 * 1.07, 1.0, 1.125),
        (2688.0, 1.0, 448.0),  # the largest there is
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
    """With a block maximum of 6 the scale is one, so codes are plain E2M1: every value, midpoint and neighbour."""
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


def test_codes_are_packed_two_a_byte_the_first_one_low():
    codes, _ = cast(block(6.0, -0.5, 1.0, -0.0), 1.0)
    assert codes.tolist() == [[0x97, 0x82, 0, 0, 0, 0, 0, 0]]


TENSOR_SCALES = {
    "dynamic": lambda x: dynamic_tensor_scale(x),
    "power of two above": lambda x: 2.0 ** math.ceil(math.log2(dynamic_tensor_scale(x))),
    "far too large": lambda x: dynamic_tensor_scale(x) * 1e6,
    "too small": lambda x: dynamic_tensor_scale(x) * 0.3,
    "one": lambda x: 1.0,
}


@pytest.mark.parametrize("choice", TENSOR_SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("spread", [1.0, 1e-30, 1e30])
def test_bit_identical_to_torchao(choice, dtype, spread):
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
    # Half of E2M1's coarsest distance; of what saturates, only that it does.
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


# Tensor scales


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dynamic_tensor_scale_is_torchaos(dtype):
    from torchao.prototype.mx_formats.nvfp4_tensor import per_tensor_amax_to_scale

    for spread in (1.0, 1e-30, 1e30):
        x = draw(7, 48, scale=spread).to(dtype)
        got = dynamic_tensor_scale(x)
        assert got.dtype == torch.float32 and got.shape == ()
        assert torch.equal(got, per_tensor_amax_to_scale(x.abs().max()))
        assert torch.equal(got, dynamic_tensor_scale(torch.stack([part.abs().max() for part in x.chunk(3)])))


@pytest.mark.parametrize("amax", [0.0, 2.0**-149, 2.0**-126, 2.0**-112])
def test_zeros_and_tiny_tensors_have_a_tensor_scale(amax):
    x = torch.zeros(2, 32)
    x[1, 5] = amax
    tensor_scale = dynamic_tensor_scale(x)
    assert tensor_scale.item() == MIN_TENSOR_SCALE
    codes, scales = cast(x, tensor_scale)
    assert not codes[0].any() and torch.equal(dequantize(codes, scales, tensor_scale)[0], x[0])
    assert dequantize(codes, scales, tensor_scale).isfinite().all()
    for ours, theirs in zip((codes, scales), torchao_cast(x, tensor_scale)):
        assert same_bits(ours, theirs)


def test_an_empty_tensor_has_a_tensor_scale():
    assert dynamic_tensor_scale(torch.empty(0, 16)).item() == MIN_TENSOR_SCALE


def test_the_power_of_two_at_or_above_a_dynamic_tensor_scale():
    for exponent in (-121, -120, -40, -1, 0, 1, 100):
        for factor, above in ((1.0, 0), (1 + 2.0**-23, 1), (1.5, 1), (2 - 2.0**-23, 1)):
            x = torch.tensor([[0.0, -factor * 2.0**exponent * 2688]])
            got = power_of_two_tensor_scale(x)
            assert got.shape == () and got.dtype == torch.float32
            assert got.item() == 2.0 ** math.ceil(math.log2(dynamic_tensor_scale(x).item()))
            if factor in (1.0, 1.5):
                assert got.item() == 2.0 ** (exponent + above)
    for bad in (INF, NAN):
        assert not power_of_two_tensor_scale(torch.tensor([1.0, bad])).isfinite()
    assert power_of_two_tensor_scale(torch.zeros(0)) == power_of_two_tensor_scale(torch.zeros(4)) == MIN_TENSOR_SCALE


@pytest.mark.parametrize("bad", [INF, NAN])
def test_with_a_dynamic_tensor_scale_non_finite_never_becomes_finite(bad):
    x = torch.ones(2, 32)
    x[0, 0] = bad
    tensor_scale = dynamic_tensor_scale(x)
    assert not tensor_scale.isfinite()
    assert dequantize(*cast(x, tensor_scale), tensor_scale).isnan().all()


def test_static_tensor_scale_is_the_smallest_power_of_two_that_holds_the_bound():
    for columns in (16, 48, 256, 768, 4096, 16384):
        blocks = columns / 16
        for p, estimator, bound in (
            (1, "pre_round", norm_constant(1, 16) * blocks),
            (2, "pre_round", norm_constant(2, 16) * math.sqrt(blocks)),
            (2, "exact", math.sqrt(columns)),
        ):
            scale = static_tensor_scale(columns, p, estimator)
            assert math.frexp(scale)[0] == 0.5, "a power of two"
            assert scale / 2 < bound / 2688 <= scale
    assert static_tensor_scale(4096) == 2.0**-6  # 2.13295 * sqrt(256) / 2688 = 0.0127
    assert static_tensor_scale(4096, p=1) == 0.25  # 2.07720 * 256 / 2688 = 0.198
    assert static_tensor_scale(7056, estimator="exact") == 2.0**-5  # 84 / 2688, itself a power of two


ESTIMATES = [(1, "pre_round"), (2, "pre_round"), (2, "exact")]


def normalized(x: torch.Tensor, p: int, estimator: str) -> torch.Tensor:
    estimate = RMSEstimate(p, estimator, eps=1e-12, block_size=16)
    return scale_rows(x, inverse_rms(x, estimate, get_recipe("unquantized")))


def extreme_rows(columns: int) -> torch.Tensor:
    one_outlier = torch.zeros(columns)
    one_outlier[columns // 2] = -3.0
    one_per_block = torch.zeros(columns)
    one_per_block[::16] = 1.0
    full_block = torch.zeros(columns)
    full_block[:16] = 5.0
    decay = torch.exp2(-torch.arange(columns, dtype=torch.float32).clamp(max=100))
    on_noise = draw(columns, scale=1e-3) + one_outlier
    rows = torch.stack([one_outlier, torch.ones(columns), one_per_block, full_block, decay, on_noise, draw(columns)])
    return torch.cat([rows, rows * 1e30, rows * 1e-30, torch.zeros(1, columns)])


@pytest.mark.parametrize(("p", "estimator"), ESTIMATES)
@pytest.mark.parametrize("columns", [16, 64, 1008, 4096, 7056])
def test_no_output_of_mxnorm_exceeds_its_static_tensor_scale(columns, p, estimator):
    xhat = normalized(extreme_rows(columns), p, estimator)
    tensor_scale = static_tensor_scale(columns, p, estimator)
    largest = xhat.abs().amax()
    # Two roundings to fp32, of rho and of the product; they only matter where the bound itself is a power of two.
    assert largest <= RANGE * tensor_scale * (1 + 2**-22)
    assert largest > RANGE * tensor_scale / 2, "an outlier alone reaches the bound: no smaller power of two would do"
    values = dequantize(*cast(xhat, tensor_scale), tensor_scale)
    assert values.isfinite().all()
    # The largest element loses a 16th to a scale that was rounded down, or half of E2M1's distance to one rounded up.
    top = xhat.abs().argmax(-1, keepdim=True)
    error = (values - xhat).gather(-1, top).abs() / xhat.gather(-1, top).abs().clamp(min=1e-6)
    assert error.max() <= 1 / 15


@settings(max_examples=100, deadline=None)
@given(st.lists(st.floats(-40, 40), min_size=64, max_size=64), st.sampled_from(ESTIMATES))
def test_no_row_exceeds_its_static_tensor_scale(exponents, estimate):
    xhat = normalized(torch.exp2(torch.tensor([exponents], dtype=torch.float32)), *estimate)
    assert xhat.abs().amax() <= RANGE * static_tensor_scale(64, *estimate)


def test_beyond_the_static_tensor_scale_values_saturate():
    tensor_scale = static_tensor_scale(256)
    x = draw(4, 256)
    x[1, 3], x[2, 4] = 1e30, -1e4
    values = dequantize(*cast(x, tensor_scale), tensor_scale)
    assert values.isfinite().all()
    assert values[1, 3] == RANGE * tensor_scale and values[2, 4] == -RANGE * tensor_scale


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((250,), "columns = 250"),
        ((0,), "columns = 0"),
        ((256, 3), "p = 3"),
        ((256, 2, "post_round"), "'post_round' does not bound the output"),
    ],
)
def test_there_is_no_static_tensor_scale(arguments, message):
    with pytest.raises(ValueError, match=message):
        static_tensor_scale(*arguments)


# Stochastic rounding


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


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(
    "value", [2.0**-17, 0.1, 0.25, 0.4999, 0.5001, 0.75, 0.99, 1.3, 1.75, 1.999, 2.001, 2.7, 3.5, 3.9, 4.1, 5.0, 5.999]
)
def test_the_decision_by_hand(value, sign):
    """The larger neighbour from 2^16 - t on, with t the fraction in units of 2^-16: of 2^16 equally likely bits, t."""
    value = sign * torch.tensor(value).item()
    low, high = neighbours(value)
    fraction = (value - low) / (high - low)
    t = round(fraction * 2**16)
    assert t > 0, "an element so small may yet be rounded up"
    assert rounded(value, 0) == low
    assert rounded(value, 2**16 - t - 1) == low
    assert rounded(value, 2**16 - t) == high
    assert rounded(value, 2**16 - 1) == high


@pytest.mark.parametrize("bits", [0, 2**15, 2**16 - 1])
def test_bits_change_no_representable_value(bits):
    x = torch.tensor([E2M1 + [-v for v in E2M1]])
    codes, scales = cast(x, 1.0, torch.full(x.shape, bits))
    assert same_bits(codes, cast(x, 1.0)[0]), "negative zero included"
    assert torch.equal(dequantize(codes, scales), x)


@pytest.mark.parametrize("bits", [0, 2**15, 2**16 - 1])
def test_what_exceeds_the_largest_value_saturates_whatever_the_bits(bits):
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
    """Over all bits, the mean is off by the rounding of the fraction: by chance, not by rule."""
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
    """Nearest loses what lies under a quarter of a block's smallest step; stochastic rounding keeps its mean."""
    x = torch.full((20_000, 16), 0.02)
    x[:, 0] = 6.0
    assert dequantize(*cast(x, 1.0))[:, 1:].count_nonzero() == 0
    kept = dequantize(*cast(x, 1.0, draw_bits(*x.shape)))[:, 1:].double()
    assert kept.mean().item() == pytest.approx(0.02, abs=3 * kept.std().item() / math.sqrt(kept.numel()))


# Tiles of 16 x 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_and_its_transpose_have_the_same_values(dtype):
    w = (draw(48, 80) * draw(48, 1, seed=1).exp()).to(dtype)
    tensor_scale = dynamic_tensor_scale(w)
    values = dequantize(*cast_tiles(w, tensor_scale), tensor_scale)
    transposed = dequantize(*cast_tiles(w.t(), tensor_scale), tensor_scale)
    assert torch.equal(values.t(), transposed)
    assert not torch.equal(dequantize(*cast(w, tensor_scale)).t(), dequantize(*cast(w.t(), tensor_scale)))


def test_a_tile_shares_the_scale_of_its_largest_element():
    w = draw(32, 48)
    codes, scales = cast_tiles(w, 2.0**-6)
    assert codes.shape == (32, 24) and scales.shape == (32, 3)
    tiles = w.reshape(2, 16, 3, 16).transpose(1, 2).reshape(6, 256)
    top = tiles.gather(1, tiles.abs().argmax(1, keepdim=True)).expand(6, 16)
    _, expected = torchao_cast(top.contiguous(), 2.0**-6)
    assert torch.equal(scales.float().reshape(2, 16, 3), expected.float().reshape(2, 1, 3).expand(2, 16, 3))


def test_tiles_whose_blocks_all_have_the_tiles_maximum_cast_like_torchao():
    w = draw(32, 64).clamp(-2, 2)
    w[:, ::16] = 2.0 * draw(32, 4, seed=1).sign()
    w[16:] *= 0.003
    for tensor_scale in (dynamic_tensor_scale(w), 2.0**-8):
        for ours, theirs in zip(cast_tiles(w, tensor_scale), torchao_cast(w, tensor_scale)):
            assert same_bits(ours, theirs)


@pytest.mark.parametrize("exponent", [-20, -3, 0, 5])
def test_under_a_power_of_two_tiles_have_the_bits_of_torchaos_training_kernel(exponent):
    """torchao 0.18's ``triton_weight_quantize_2d``, which needs Blackwell, in the order of operations it documents.

    It is given the tensor's amax and rounds 2688 / amax; where that is a power of two, no rounding differs.
    """
    from torchao.prototype.mx_formats.kernels import f32_to_f4_unpacked, pack_uint4

    amax = torch.tensor(RANGE * 2.0**exponent)
    w = draw(32, 64, seed=exponent + 40) * draw(32, 1, seed=3).exp() * 2.0 ** (exponent + 5)
    w[0, 0] = amax
    encode = RANGE / amax
    decode = 1.0 / encode
    largest = w.reshape(2, 16, 4, 16).abs().amax((1, 3))
    scales = ((largest / 6) * encode).clamp(2.0**-6, 448).to(torch.float8_e4m3fn).float()
    factor = (1.0 / (scales * decode)).repeat_interleave(16, 0).repeat_interleave(16, 1)
    scaled = (w * factor).clamp(-6, 6)
    codes, tile_scales = cast_tiles(w, dynamic_tensor_scale(w))
    assert torch.equal(tile_scales.float(), scales.repeat_interleave(16, 0))
    assert torch.equal(codes, pack_uint4(f32_to_f4_unpacked(scaled)))


def test_an_incomplete_tile_is_cast_as_if_filled_up_with_zeros():
    w = draw(40, 32)
    full = cast_tiles(torch.cat([w, torch.zeros(8, 32)]), 2.0**-8)
    for part, whole in zip(cast_tiles(w, 2.0**-8), full):
        assert same_bits(part, whole[:40])


# Images


@pytest.mark.parametrize("tensor_scale", [2.0**-8, 0.0031])
def test_images_are_exact_in_bf16_and_hold_no_tensor_scale(tensor_scale):
    x = draw(32, 96) * draw(32, 1, seed=1).mul(2).exp()
    bits = draw_bits(32, 96)
    for got, wide, (codes, scales) in (
        (image(x, tensor_scale), image(x, tensor_scale, torch.float32), cast(x, tensor_scale)),
        (
            image(x, tensor_scale, bits=bits),
            image(x, tensor_scale, torch.float32, bits),
            cast(x, tensor_scale, bits),
        ),
        (image_tiles(x, tensor_scale), image_tiles(x, tensor_scale, torch.float32), cast_tiles(x, tensor_scale)),
    ):
        assert got.dtype == torch.bfloat16 and torch.equal(got.float(), wide)
        assert torch.equal(wide, dequantize(codes, scales))
        assert torch.equal(wide * tensor_scale, dequantize(codes, scales, tensor_scale))


def test_every_product_of_an_element_and_a_scale_is_exact_in_bf16():
    scales = torch.arange(8, 127, dtype=torch.uint8).view(torch.float8_e4m3fn)  # 2^-6 to 448
    products = torch.outer(torch.tensor(E2M1), scales.float())
    assert torch.equal(products.bfloat16().float(), products)


# Shapes, dtypes, tracing


@pytest.mark.parametrize("function", [cast, cast_tiles])
@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(2, 24), r"shape \(2, 24\).*multiple of 16"),
        (torch.ones(2, 0), r"shape \(2, 0\)"),
        (torch.tensor(1.0), r"shape \(\)"),
        (torch.ones(2, 16, dtype=torch.float16), "torch.float16"),
        (torch.ones(2, 16, dtype=torch.float64), "torch.float64"),
    ],
)
def test_what_cannot_be_cast(function, x, message):
    with pytest.raises(ValueError, match=message):
        function(x, 1.0)


def test_tiles_need_a_matrix():
    with pytest.raises(ValueError, match=r"shape \(2, 16, 16\)"):
        cast_tiles(torch.ones(2, 16, 16), 1.0)


@pytest.mark.parametrize("bits", [torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 16, dtype=torch.int32)])
def test_bits_of_another_shape_or_dtype(bits):
    with pytest.raises(ValueError, match=r"bits: .*expected torch.int64 \(2, 16\)"):
        cast(torch.ones(2, 16), 1.0, bits)


def test_no_rows_one_dimension_and_strides():
    for function in (cast, cast_tiles):
        codes, scales = function(torch.empty(0, 64), 1.0)
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
        return (*cast(x, dynamic, bits), image(x, 2.0**-8), image_tiles(x, dynamic))

    x, bits = draw(32, 48), draw_bits(32, 48)
    torch._dynamo.reset()
    for got, expected in zip(torch.compile(run, backend="aot_eager", fullgraph=True)(x, bits), run(x, bits)):
        assert same_bits(got, expected)
