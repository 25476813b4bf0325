"""Checks of operands that several kernels share."""

import pytest
import torch

from mxtrain.kernels.checks import check_parts
from tests.support.kernel_checks import kernel_tests

pytestmark = kernel_tests


def test_parts_with_whole_blocks_along_the_axis_join():
    check_parts([torch.ones(32, 24), torch.ones(16, 24)], 0, 16)
    check_parts([torch.ones(5, 32), torch.ones(5, 16)], 1, 16)
    check_parts([torch.ones(0, 32), torch.ones(0, 16)], 1, 16)


@pytest.mark.parametrize(
    ("shapes", "axis", "message"),
    [
        (((16, 32), (16, 16)), 0, r"parts\[1\] \(16, 16\), .*: expected the dtype, the device and the size in .* 1 of"),
        (((16, 32), (32, 32)), 1, r"parts\[1\] \(32, 32\), .*: expected the dtype, the device and the size in .* 0 of"),
        (((16, 64), (24, 64)), 0, r"parts\[1\] \(64, 24\): expected a row length that is a multiple of 16"),
        (((24, 24), (24, 32)), 1, r"parts\[0\] \(24, 24\): expected a row length that is a multiple of 16"),
        (((16,), (16,)), 0, r"parts\[0\] \(16,\): expected a matrix"),
    ],
    ids=["rows", "columns", "blocks of rows", "blocks of columns", "vectors"],
)
def test_parts_that_do_not_join(shapes, axis, message):
    with pytest.raises(ValueError, match=message):
        check_parts([torch.ones(shape) for shape in shapes], axis, 16)


def test_parts_of_two_dtypes_do_not_join():
    with pytest.raises(ValueError, match=r"parts\[1\] \(16, 16\), torch.bfloat16: expected the dtype"):
        check_parts([torch.ones(16, 16), torch.ones(16, 16, dtype=torch.bfloat16)], 0, 16)
