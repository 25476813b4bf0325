"""NVFP4 arithmetic in kernels: block scales, both roundings and packing, against the reference and torch's E4M3."""

import pytest
import torch
import triton
import triton.language as tl

from mxtrain.formats.e2m1 import encode, pack
from mxtrain.formats.mx.arithmetic import round_to_element
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.nvfp4.arithmetic import (
    element_code,
    multiplier,
    pack_nearest,
    round_stochastically,
    scale_of_block,
)
from mxtrain.formats.nvfp4.cast import nvfp4_cast
from mxtrain.launch.launch import converts_fp4
from tests.support.kernel_checks import assert_same_bits, draw, kernel_tests
from tests.support.nvfp4_checks import assert_is_nvfp4, positive_nans

pytestmark = kernel_tests

INF, NAN = float("inf"), float("nan")


def e2m1_magnitudes() -> torch.Tensor:
    return torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])


def padded_to_power_of_two(x: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(x, (0, triton.next_power_of_2(x.numel()) - x.numel()))


@triton.jit
def _scale_kernel(amax_ptr, code_ptr, value_ptr, multiplier_ptr, tensor_scale, N: tl.constexpr):
    i = tl.arange(0, N)
    inverse = tl.div_rn(1.0, tensor_scale)
    code, value = scale_of_block(tl.load(amax_ptr + i), inverse)
    tl.store(code_ptr + i, code)
    tl.store(value_ptr + i, value)
    tl.store(multiplier_ptr + i, multiplier(value, inverse))


def amax_probes() -> torch.Tensor:
    """Six times every E4M3 value and midpoint, with their neighbors, and fp32 numbers of every exponent."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2]) * 6
    near = [points]
    for target in (torch.zeros_like(points), torch.full_like(points, INF)):
        other = points
        for _ in range(2):
            other = torch.nextafter(other, target)
            near.append(other)
    sizes = 2.0 ** torch.arange(-149, 128, dtype=torch.float64).repeat_interleave(4)
    sizes = (sizes * torch.tensor([1.0, 1.26, 1.5, 1.99]).repeat(277)).float()
    return torch.cat([*near, sizes, torch.tensor([INF, NAN, 3.4028234663852886e38])])


@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-8, 2.0**-121, 2.0**117, INF, NAN])
def test_block_scales_are_the_references(tensor_scale):
    amax = padded_to_power_of_two(amax_probes())
    code, value, factor = torch.empty_like(amax, dtype=torch.uint8), torch.empty_like(amax), torch.empty_like(amax)
    _scale_kernel[(1,)](amax, code, value, factor, tensor_scale, amax.numel())
    _, want = nvfp4.cast(torch.nn.functional.pad(amax[:, None], (0, 15)), tensor_scale)
    want = positive_nans(want.flatten())
    assert_same_bits(code, want.view(torch.uint8))
    assert_same_bits(value, want.float())
    assert_same_bits(factor, (1.0 / torch.tensor(tensor_scale)) / want.float())


def e2m1_probes() -> torch.Tensor:
    """Every E2M1 value and midpoint, their neighbors, and numbers beyond and below, of both signs."""
    values = e2m1_magnitudes()
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, torch.tensor([5.5, 6.1, 7.0, 448.0, 3e38, 2.0**-126])])
    up, down = torch.full_like(points, INF), torch.zeros_like(points)
    extremes = torch.tensor([INF, 2.0**-149, 2.0**-140, 1e-20, 0.1, 0.3, 2.7, 3.3])
    points = torch.cat(
        [points, torch.nextafter(points, up), torch.nextafter(points, down), extremes, draw(64).abs() * 2]
    )
    return torch.cat([points, -points])


@triton.jit
def _rounding_kernel(
    y_ptr, random_ptr, value_ptr, code_ptr, packed_ptr, N: tl.constexpr, RANDOM: tl.constexpr, HARDWARE: tl.constexpr
):
    i = tl.arange(0, N)
    y = tl.load(y_ptr + i)
    if RANDOM:
        random = tl.load(random_ptr + i).to(tl.int32)
        # The other half of a word changes nothing.
        value = round_stochastically(y, random - 65536, False)
        upper = round_stochastically(y, (random << 16) + 65535, True)
        value = tl.where(value.to(tl.int32, bitcast=True) == upper.to(tl.int32, bitcast=True), value, float("nan"))
    else:
        value = round_to_element(y, "e2m1")
        first, second = tl.split(tl.reshape(y, (N // 2, 2)))
        tl.store(packed_ptr + tl.arange(0, N // 2), pack_nearest(first, second, HARDWARE))
    tl.store(value_ptr + i, value)
    tl.store(code_ptr + i, element_code(value).to(tl.uint8))


def rounded(y: torch.Tensor, random: torch.Tensor | None = None, hardware: bool = False):
    """Values, codes and packed codes from the kernel, and from the reference for blocks whose scale is one."""
    value, code = torch.empty_like(y), torch.empty_like(y, dtype=torch.uint8)
    packed = torch.empty(y.numel() // 2, dtype=torch.uint8)
    _rounding_kernel[(1,)](y, random, value, code, packed, y.numel(), random is not None, hardware)
    want = encode(y, random)
    values = e2m1_magnitudes()
    signed = torch.cat([values, -values])[want.int()]
    return (value, code, packed), (signed, want, pack(want))


@pytest.mark.parametrize("hardware", [False, True])
def test_rounding_to_nearest(hardware):
    y = padded_to_power_of_two(e2m1_probes())
    if hardware and not converts_fp4(y):
        pytest.skip("needs a GPU with an E2M1 conversion (compute capability 10.0 and up)")
    for got, want in zip(*rounded(y, hardware=hardware)):
        assert_same_bits(got, want)


def test_stochastic_rounding_around_every_threshold():
    """The random bits just reach, or just miss, the carry to the larger neighbor."""
    y = padded_to_power_of_two(e2m1_probes())
    size = y.abs().clamp(max=6.0)
    values = e2m1_magnitudes()
    upper = torch.searchsorted(values, size).clamp(min=1)
    low, high = values[upper - 1], values[upper]
    fraction = (((size - low) / (high - low)).double() * 2.0**16).round().long()
    edge = 2**16 - fraction
    choices = [edge, edge - 1, torch.zeros_like(edge), torch.full_like(edge, 2**16 - 1), torch.full_like(edge, 2**15)]
    generator = torch.Generator("cpu").manual_seed(0)
    for _ in range(3):
        choices.append(torch.randint(0, 2**16, y.shape, generator=generator, device="cpu").to(y.device))
    for random in choices:
        (value, code, _), (want_value, want_code, _) = rounded(y, random.clamp(0, 2**16 - 1))
        assert_same_bits(value, want_value)
        assert_same_bits(code, want_code)


@pytest.mark.parametrize("tensor_scale", [1.0, 2.0**-121, INF, NAN])
def test_zero_infinite_and_nan_blocks(tensor_scale):
    """With any tensor scale, including the infinite one of a tensor that holds an infinity."""
    # Four rows per special number: ordinary, tiny, huge and zero beside it.
    specials = torch.tensor([0.0, -0.0, INF, -INF, NAN, 2.0**-149, 3.4028234663852886e38, 1.0])
    sizes = torch.tensor([1.0, 2.0**-130, 2.0**100, 0.0]).repeat(8)
    x = draw(32, 32) * sizes[:, None]
    x[:, 17] = specials.repeat_interleave(4)
    scale = torch.tensor(tensor_scale)
    for form in ("codes", "image") if tensor_scale == 1.0 else ("codes",):
        for dim, matrix in ((1, x), (0, x.t().contiguous())):
            data, scales = nvfp4_cast([matrix], scale.view(1, 1), form, (dim,))[dim]
            data = data.t() if dim == 0 and form == "image" else data
            assert_is_nvfp4((data, scales), nvfp4.cast(x, scale), scale, form)
