"""Arithmetic in kernels: scales against the reference's, rounding against PyTorch's, the blocked layout."""

import pytest
import torch
import triton
import triton.language as tl

from mxtrain.formats.cast_kernels import scale_offset
from mxtrain.formats.e2m1 import decode, encode
from mxtrain.formats.mx.arithmetic import element_codes, element_image, scale_code
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.mx.reference import scale_codes, to_blocked
from mxtrain.formats.mxfp4 import MXFP4
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.recipe import Format
from mxtrain.launch.launch import converts_fp8
from tests.support.kernel_checks import (
    OTHER_ELEMENTS,
    RECIPES,
    assert_is_cast,
    assert_same_bits,
    bits,
    draw,
    kernel_tests,
)

pytestmark = kernel_tests

FORMATS = {"e4m3": MXFP8, **{element: recipe.format for element, recipe in OTHER_ELEMENTS.items()}}

INF, NAN = float("inf"), float("nan")


def amax_probes(rounding: str) -> torch.Tensor:
    """fp32 numbers of every exponent, denormals included, around each mantissa that a scale could depend on."""
    mantissas = torch.tensor([0, 1, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFF])
    if rounding != "floor":
        # In torchao 0.18, up to 23 numbers above 2^k have a logarithm of k, here divided by 448 = 1.75 * 2^8. The last
        # such denormal number is 11 above 2^-127, which takes a maximum 37 to 40 above 448 * 2^-127.
        around = torch.arange(-4, 48)
        mantissas = torch.cat([mantissas, around[4:], 0x600000 + around, 2 ** torch.arange(7, 23)])
    exponents = torch.arange(255)
    return ((exponents[:, None] << 23) | mantissas).to(torch.int32).view(torch.float32).flatten()


def blocks_with_maximum(amax: torch.Tensor) -> torch.Tensor:
    """[N] -> [N, 32] with these largest magnitudes, whose position and sign vary from row to row."""
    blocks = amax[:, None] * draw(amax.numel(), 32).clamp(-0.99, 0.99)
    row = torch.arange(amax.numel())
    blocks[row, row % 32] = torch.where(row % 3 == 0, -amax, amax)
    return blocks


@pytest.mark.parametrize("rounding", RECIPES)
def test_scales_and_codes_for_block_maxima_of_every_exponent(rounding):
    amax = amax_probes(rounding)
    # Rows as wide as the kernel's tile.
    x = blocks_with_maximum(torch.cat([amax, amax[: -amax.numel() % 4]])).view(-1, 128)
    result = cast(x, RECIPES[rounding])[1]
    assert_is_cast(result, x, rounding, "codes")


@triton.jit
def _scale_code_kernel(amax_ptr, codes_ptr, N: tl.constexpr, ROUNDING: tl.constexpr, ELEMENT: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(codes_ptr + i, scale_code(tl.load(amax_ptr + i), ROUNDING, ELEMENT))


@pytest.mark.parametrize("rounding", RECIPES)
@pytest.mark.parametrize("element", FORMATS)
def test_the_scale_of_every_bf16_maximum(element, rounding):
    """And of fp32 numbers around the largest element times 2^k. NaN has 127 patterns, which are all 255."""
    fmt, exponents = FORMATS[element], torch.arange(255)[:, None] << 23
    mantissa = int(fmt.element_max * 2 ** (23 - fmt.element_max_exponent)) - 2**23
    amax = torch.cat([torch.arange(2**15) << 16, (exponents | (mantissa + torch.arange(-4, 48))).flatten()])
    amax = torch.nn.functional.pad(amax, (0, 2**16 - len(amax))).int().view(torch.float32)
    codes = torch.zeros(2**16, dtype=torch.int32)
    _scale_code_kernel[(1,)](amax, codes, 2**16, rounding, element)
    assert torch.equal(codes, scale_codes(amax, fmt, rounding))
    assert set(range(255 - fmt.element_max_exponent)) <= set(codes.tolist()) and (codes[amax.isnan()] == 255).all()


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("rounding", RECIPES)
def test_zero_infinite_and_nan_blocks(rounding, dim):
    others = draw(8, 32)
    others[1] *= 2.0**-130
    others[2] *= 2.0**100
    others[3:5] = 0
    for special in (0.0, -0.0, INF, -INF, NAN, -NAN, 2.0**-149, 3.4028234663852886e38):
        x = others.clone()
        x[:, 17] = special
        x = x if dim == 1 else x.t().contiguous()
        for form in ("codes", "image"):
            result = cast(x, RECIPES[rounding], (dim,), form)[dim]
            assert_is_cast(result, x, rounding, form, dim)


def probes_of(fmt: Format = MXFP8) -> torch.Tensor:
    """All values, their midpoints and numbers beyond, each with both fp32 neighbors, of both signs."""
    values = torch.arange(256).to(torch.uint8)
    values = decode(values[:128]) if fmt is MXFP4 else values.view(getattr(torch, fmt.element)).float()
    values = values[values.isfinite() & ~values.signbit()].unique()
    assert values[-1] == fmt.element_max
    beyond = values[-1] * torch.tensor([1.03, 1.07, 1.15, 2.0, 1e10, 1e33])
    beyond = torch.cat([beyond, torch.tensor([2.0**-10, 2.0**-11, 2.0**-17, 2.0**-18, 2.0**-126, 2.0**-149])])
    points = torch.cat([values, (values[1:] + values[:-1]) / 2, beyond])
    up, down = torch.full_like(points, INF), torch.zeros_like(points)
    points = torch.cat([points, torch.nextafter(points, up), torch.nextafter(points, down)])
    return torch.cat([points, -points])


def rounded_by_pytorch(y: torch.Tensor, fmt: Format = MXFP8) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and values of PyTorch's own cast, which does not saturate to E5M2, nor up to 2.11 to E4M3."""
    if fmt is MXFP4:
        codes = encode(y)
        return codes, decode(codes)[::2]
    codes = y.cpu().clamp(-fmt.element_max, fmt.element_max).to(getattr(torch, fmt.element)).to(y.device)
    return bits(codes), codes.float()


@triton.jit
def _rounding_kernel(
    y_ptr, scale_ptr, codes_ptr, image_ptr, N: tl.constexpr, ELEMENT: tl.constexpr, HARDWARE: tl.constexpr
):
    i = tl.arange(0, N)
    y = tl.load(y_ptr + i)
    tl.store(codes_ptr + i, element_codes(y, ELEMENT, HARDWARE))
    tl.store(image_ptr + i, element_image(y, tl.load(scale_ptr + i), ELEMENT, HARDWARE))


def rounded_by_kernel(
    y: torch.Tensor, scale: torch.Tensor, hardware: bool, element: str = "e4m3"
) -> tuple[torch.Tensor, torch.Tensor]:
    if hardware and not converts_fp8(y):
        pytest.skip("needs a GPU with conversions to 8 bits (compute capability 8.9 and up)")
    size = triton.next_power_of_2(y.numel())
    padded, scales = torch.zeros(size), torch.ones(size)
    padded[: y.numel()], scales[: y.numel()] = y, scale
    codes, image = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.bfloat16)
    _rounding_kernel[(1,)](padded, scales, codes, image, size, element, hardware)
    return codes[: y.numel()], image[: y.numel()]


@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("element", FORMATS)
def test_rounding_is_pytorchs(element, hardware):
    probes = torch.cat([probes_of(FORMATS[element]), torch.tensor([INF, -INF])])
    for exponent in (-100, 0, 100):
        codes, image = rounded_by_kernel(probes, torch.full_like(probes, 2.0**exponent), hardware, element)
        want, values = rounded_by_pytorch(probes, FORMATS[element])
        assert_same_bits(codes, want)
        assert_same_bits(image, (values * 2.0**exponent).bfloat16())


@pytest.mark.parametrize("hardware", [False, True])
@pytest.mark.parametrize("element", ["e4m3", "e5m2"])
def test_nan_rounds_to_nan(element, hardware):
    nans = torch.tensor([0x7FC00000, 0x7F800001, -0x400000, -1], dtype=torch.int32).view(torch.float32)
    codes, image = rounded_by_kernel(nans, torch.ones_like(nans), hardware, element)
    assert (codes == 0x7F).all() and image.isnan().all()


@pytest.mark.parametrize("rounding", RECIPES)
def test_codes_of_a_cast_are_rounded_in_the_same_way(rounding):
    """With a block maximum of 448 the scale is one, so codes are the elements rounded to E4M3."""
    probes = probes_of()
    probes = probes[probes.abs() < 448]
    x = torch.nn.functional.pad(probes, (0, -probes.numel() % 31)).view(-1, 31)
    x = torch.cat([torch.full((x.shape[0], 1), 448.0), x], 1)
    codes, scales = cast(x, RECIPES[rounding])[1]
    assert (bits(scales) == 127).all()
    assert_same_bits(bits(codes), rounded_by_pytorch(x)[0])


@triton.jit
def _blocked_kernel(ids_ptr, out_ptr, rows, blocks, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    row, block = tl.arange(0, ROWS)[:, None], tl.arange(0, BLOCKS)[None, :]
    mask = (row < rows) & (block < blocks)
    ids = tl.load(ids_ptr + row * blocks + block, mask=mask)
    tl.store(out_ptr + scale_offset(row, block, blocks, "blocked"), ids, mask=mask)


@pytest.mark.parametrize(("rows", "blocks"), [(1, 1), (32, 4), (128, 4), (33, 5), (130, 3), (300, 13)])
def test_blocked_offsets_are_torchaos(rows, blocks):
    ids = torch.arange(1, rows * blocks + 1, dtype=torch.int32).view(rows, blocks)
    want = to_blocked(ids)
    got = torch.zeros_like(want)
    _blocked_kernel[(1,)](ids, got, rows, blocks, triton.next_power_of_2(rows), triton.next_power_of_2(blocks))
    assert_same_bits(got, want)
