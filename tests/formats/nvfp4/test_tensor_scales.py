"""The NVFP4 scale of a whole tensor: torchao's from the largest element, and MXNorm's from the bound of its output.

The suite runs these once more with the other release of the supported range (marker ``torchao``).
"""

import math

import pytest
import torch

from mxtrain.formats.estimate import RMSEstimate, norm_constant
from mxtrain.formats.mxnorm import inverse_rms, scale_rows
from mxtrain.formats.nvfp4 import RANGE, TENSOR_SCALE_MIN, static_tensor_scale
from mxtrain.formats.nvfp4.reference import cast, dequantize, dynamic_tensor_scale, power_of_two_tensor_scale
from mxtrain.formats.parse import get_recipe
from tests.support.nvfp4_blocks import draw, same_bits, torchao_cast

INF, NAN = float("inf"), float("nan")


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
    assert tensor_scale.item() == TENSOR_SCALE_MIN
    codes, scales = cast(x, tensor_scale)
    assert not codes[0].any() and torch.equal(dequantize(codes, scales, tensor_scale)[0], x[0])
    assert dequantize(codes, scales, tensor_scale).isfinite().all()
    for ours, theirs in zip((codes, scales), torchao_cast(x, tensor_scale)):
        assert same_bits(ours, theirs)


def test_an_empty_tensor_has_a_tensor_scale():
    assert dynamic_tensor_scale(torch.empty(0, 16)).item() == TENSOR_SCALE_MIN


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
    for zeros in (torch.zeros(0), torch.zeros(4)):
        assert power_of_two_tensor_scale(zeros) == TENSOR_SCALE_MIN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_elements_next_to_the_largest_number_dequantize_to_infinity(dtype):
    """Under the power of two above 2^128 / 2688, 2^117, the nearest block scales of E4M3 are 320 and 352."""
    limit = torch.tensor([2.0**127 * (2 - 1 / 32)], dtype=dtype)
    beyond = limit.nextafter(torch.full_like(limit, INF)), torch.full_like(limit, torch.finfo(dtype).max)
    for largest, expected in ((limit, 1920 * 2.0**117), *((each, INF) for each in beyond)):
        x = torch.cat([largest, -largest, largest.new_ones(14)])
        scale = power_of_two_tensor_scale(x)
        values = dequantize(*cast(x, scale), scale)
        assert scale == 2.0**117 and values[:2].tolist() == [expected, -expected]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((250,), "columns = 250"),
        ((256, 2, "post_round"), "'post_round' does not bound the output"),
    ],
)
def test_wrong_arguments_of_the_static_tensor_scale(arguments, message):
    with pytest.raises(ValueError, match=message):
        static_tensor_scale(*arguments)
