"""Codes on the grid of 128 elements: by hand, against the definition, and the product of such operands."""

import pytest
import torch

from mxtrain.formats.matrices import Codes, Operand
from mxtrain.formats.mx.merged import FARTHEST, codes_of, is_tiled, merge, merged_mm, values_of
from mxtrain.formats.mx.reference import cast, dequantize
from mxtrain.formats.mxfp8 import MXFP8
from tests.support.kernel_checks import ugly

NAN = float("nan")


def encoded(x: torch.Tensor) -> Codes:
    return Codes(*cast(x, MXFP8, "rceil"))


def rows_of_blocks(*blocks: float) -> torch.Tensor:
    """[1, 32 blocks]; every block is full of one number."""
    return torch.tensor(blocks).repeat_interleave(32)[None]


@pytest.mark.parametrize(
    ("blocks", "scale", "values"),
    [
        ([448.0, 1.0, 2.0**-9, 0.0], 0, [448.0, 1.0, 2.0**-9, 0.0]),  # the last is the smallest element of the grid
        ([448.0, 2.0**-10, 1.5 * 2.0**-9, -2.5 * 2.0**-9], 0, [448.0, 0.0, 2.0**-8, -(2.0**-8)]),  # ties to even
        ([1.75 * 2.0**-60, 0.0, 0.0, 0.0], -68, [1.75 * 2.0**-60, 0.0, 0.0, 0.0]),
        ([0.0, 0.0, 0.0, 0.0], -126, [0.0] * 4),
        ([448.0, NAN, 1.0, 1.0], 0, [448.0, NAN, 1.0, 1.0]),
        ([NAN] * 4, -126, [NAN] * 4),
        ([3.0e38, 2.0**-126, 1.0, 0.0], 120, [3.0e38, 0.0, 0.0, 0.0]),
        ([1.0], -8, [1.0, 0.0, 0.0, 0.0]),  # padded to a group
    ],
)
def test_groups_by_hand(blocks, scale, values):
    operand = merge(encoded(rows_of_blocks(*blocks)), tiles=False)
    assert operand.data.shape == (1, 128) and operand.scales.tolist() == [[2.0**scale]]
    want = torch.tensor(values).repeat_interleave(32)[None]
    want = torch.where(want == 3.0e38, dequantize(*encoded(rows_of_blocks(3.0e38))[:2], MXFP8)[0, 0], want)
    torch.testing.assert_close(values_of(operand, torch.float32), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("tiles", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(300, 384), (128, 160), (20, 128)])
def test_every_code_is_rounded_to_the_grid_of_its_groups_largest_scale(device, rows, columns, tiles):
    codes = encoded(ugly(rows, columns))
    own = dequantize(*codes[:2], MXFP8).double()
    operand = merge(codes, tiles)
    groups = -(-columns // 128)
    assert is_tiled(operand.data, operand.scales) == tiles and operand.scales.is_contiguous()
    assert operand.scales.shape == ((-(-rows // 128), -(-groups // 4) * 4) if tiles else (groups, rows))
    assert operand.scales.isfinite().all()
    of_blocks = torch.nn.functional.pad(codes.scales.view(torch.uint8), (0, groups * 4 - columns // 32)).double()
    of_blocks[of_blocks == 255] = 0
    largest = of_blocks.unflatten(1, (-1, 4)).amax(2)
    if tiles:
        for start in range(0, rows, 128):
            largest[start : start + 128] = largest[start : start + 128].amax(0)
    scale = 2.0 ** (largest.cpu().clamp(min=1) - 127)  # a GPU's power is not exact
    scale = scale.to(own.device).repeat_interleave(128, 1)[:, :columns]
    grid = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
    distance = ((own / scale).abs()[..., None] - grid).abs()
    got = values_of(operand, torch.float32).double()
    assert (got[:, columns:] == 0).all()
    got = got[:, :columns]
    assert torch.equal(got.isnan(), own.isnan())
    finite = own.isfinite() & (scale < 2.0**119)  # the largest number of fp32 would be infinite
    near = (got / scale - own / scale).abs() == distance.amin(-1)
    assert near[finite].all()
    assert (got[finite].signbit() == own[finite].signbit()).all()
    same = codes_of(operand)
    assert torch.equal(dequantize(*same[:2], MXFP8)[:, :columns][finite], got[finite].float())


@pytest.mark.parametrize("tiled", [0, 1])
@pytest.mark.parametrize(("m", "n", "k"), [(70, 160, 384), (1, 128, 128), (130, 256, 100)])
def test_product_has_fp32_sums_of_scaled_groups(device, tiled, m, n, k):
    generator = torch.Generator("cpu").manual_seed(0)
    operands = []
    for rows, side in ((m, 0), (n, 1)):
        x = torch.randn(rows, -(-k // 32) * 32, generator=generator, device="cpu") * 2.0**-20
        x[:, 5] *= 64 if side == 0 else 1
        operands.append(merge(encoded(x.to(torch.get_default_device())), tiles=side == tiled))
    a, b = operands
    want = values_of(a, torch.float32).double() @ values_of(b, torch.float32).double().t()
    size = values_of(a, torch.float32).double().abs() @ values_of(b, torch.float32).double().abs().t()
    for dtype, rounding in ((torch.float32, 0.0), (torch.bfloat16, 2.0**-8)):
        got = merged_mm(a.data, b.data.t(), a.scales, b.scales, dtype)
        assert got.dtype == dtype and got.shape == (m, n)
        error = (got.double() - want).abs()
        if a.data.is_cuda:
            # FP8 tensor cores keep 13 bits below the largest of the products that they add up at once. A simulation has
            # 3.3e-4 to 3.9e-4 for these matrices, and 7.9e-4 or more with 12 bits.
            assert error.norm() <= (5e-4 + rounding) * want.norm()
        else:
            assert (error <= (128 + k // 128) * 2.0**-24 * size + rounding * want.abs()).all()


def test_product_without_rows_and_the_operands_of_the_op():
    empty = Operand(torch.zeros(0, 128, dtype=torch.float8_e4m3fn), torch.zeros(1, 0))
    b = merge(encoded(torch.ones(128, 128)), tiles=True)
    assert merged_mm(empty.data, b.data.t(), empty.scales, b.scales, torch.bfloat16).shape == (0, 128)
    a = merge(encoded(torch.ones(4, 128)), False)
    arguments = a.data, b.data.t(), a.scales, b.scales, torch.bfloat16
    torch.library.opcheck(merged_mm, arguments, test_utils="test_faketensor")


def test_fp16_holds_what_the_second_rounding_needs():
    """Kernels multiply E4M3 numbers by a power of two in fp16, which rounds those below 2^-20, and round to E4M3."""
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    factors = 2.0 ** -torch.arange(FARTHEST + 1).float()
    in_fp16 = (codes.half() * factors.half()[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    in_fp32 = (codes.float() * factors[:, None]).to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(in_fp16, in_fp32)
