"""Tensor scales by kernel, against the reference."""

import pytest
import torch

from mxtrain.formats.hadamard import hadamard, pad
from mxtrain.formats.nvfp4 import RANGE, TENSOR_SCALE_MIN
from mxtrain.formats.nvfp4.reference import power_of_two_tensor_scale
from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
from tests.support.kernel_checks import assert_same_bits, draw, kernel_tests, poisoned_memory
from tests.support.nvfp4_checks import SIGNS, signs

pytestmark = kernel_tests

INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, 1e-45, TENSOR_SCALE_MIN * RANGE, RANGE, 2 * RANGE, 3.4e38, INF, NAN)
AROUND = [torch.nextafter(torch.tensor(RANGE), torch.tensor(to)).item() for to in (0.0, INF)]


@pytest.mark.parametrize("largest", (*SPECIAL, *AROUND))
def test_the_scale_of_the_largest_magnitude_anywhere(device, largest):
    """In the first program or the last one, with either sign."""
    matrix = torch.rand((35, 160), generator=torch.Generator("cpu").manual_seed(0), device="cpu").to(device)
    for place, sign in (((0, 0), 1), ((17, 140), -1), ((-1, -1), -1)):
        x = matrix * min(largest, 1e38)
        x[place] = sign * largest
        with poisoned_memory():
            (((got,),), want) = nvfp4_tensor_scales([x]), power_of_two_tensor_scale(x)
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
        assert got.isnan() if largest != largest else got > 0


@pytest.mark.parametrize("transform", [False, True])
def test_parts_have_scales_of_their_own(transform):
    """So has an empty part."""
    parts = [draw(20, 48), draw(20, 16, seed=1) * 1e6, torch.empty(0, 16), torch.full((5, 32), NAN)]
    got = nvfp4_tensor_scales(parts, signs() if transform else None)
    assert got.shape == (4, 1 + transform) and got.dtype == torch.float32
    for x, of_part in zip(parts, got):
        assert_same_bits(of_part[0], power_of_two_tensor_scale(x))
        if transform:
            assert_same_bits(of_part[1], power_of_two_tensor_scale(hadamard(pad(x), SIGNS, 0)))


def test_groups_have_scales_of_their_own():
    """Rows beyond the last end do not count; a group may be empty."""
    x, ends = draw(112, 144) * torch.arange(112)[:, None].exp2().clamp(max=1e30), (16, 16, 64, 96)
    x[96:] = NAN
    got = nvfp4_tensor_scales([x], ends=torch.tensor(ends, dtype=torch.int32))
    want = [power_of_two_tensor_scale(x[start:end]) for start, end in zip((0, *ends), ends)]
    assert_same_bits(got, torch.stack(want)[:, None])
