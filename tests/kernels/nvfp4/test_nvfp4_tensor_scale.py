"""The tensor scale from maxima, against the reference."""

import pytest
import torch

from mxtrain.kernels.nvfp4.tensor_scale import nvfp4_tensor_scale
from mxtrain.recipes.formats import NVFP4_RANGE, NVFP4_TENSOR_SCALE_MIN
from mxtrain.reference.nvfp4 import power_of_two_tensor_scale

INF, NAN = float("inf"), float("nan")
SPECIAL = (0.0, 1e-45, NVFP4_TENSOR_SCALE_MIN * NVFP4_RANGE, NVFP4_RANGE, 2 * NVFP4_RANGE, 3.4e38, INF, NAN)


@pytest.mark.parametrize("count", [1, 3, 8192, 20001])
def test_the_scale_of_the_reference(device, count):
    maxima = torch.rand(count, generator=torch.Generator("cpu").manual_seed(count), device="cpu").to(device)
    around = [torch.nextafter(torch.tensor(NVFP4_RANGE), torch.tensor(to)).item() for to in (0.0, INF)]
    for largest in (*SPECIAL, *around):
        for place in (0, count // 2, -1):
            x = maxima * min(largest, 1e38)
            x[place] = largest
            got, want = nvfp4_tensor_scale(x), power_of_two_tensor_scale(x)
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
            assert got.shape == () and (got.isnan() if largest != largest else got > 0)


def test_no_maxima_and_a_single_number(device):
    assert nvfp4_tensor_scale(torch.empty(0)).item() == NVFP4_TENSOR_SCALE_MIN
    assert nvfp4_tensor_scale(torch.tensor(3 * NVFP4_RANGE)).item() == 4
