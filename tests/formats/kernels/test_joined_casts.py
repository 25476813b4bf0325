"""Casts of several matrices into one operand: every part has the bits that it has alone."""

import pytest
import torch

from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.matrices import joined
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.nvfp4.cast import nvfp4_cast
from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
from tests.support.kernel_checks import (
    RECIPES,
    assert_same_bits,
    assert_same_results,
    draw,
    kernel_tests,
    poisoned_memory,
    ugly,
)

pytestmark = kernel_tests


def check_mxfp8(parts, axis, dims, form, rounding="rceil", experts=1, **factor):
    recipe = RECIPES[rounding]
    expected = cast(joined(parts, axis, experts), recipe, dims, form, **factor)
    with poisoned_memory():
        results = cast(parts, recipe, dims, form, axis=axis, experts=experts, **factor)
    assert results.keys() == expected.keys() == {*dims}
    for dim, want in expected.items():
        assert_same_results(results[dim], want)


@pytest.mark.parametrize("form", FORMS)
def test_mxfp8_has_the_bits_of_the_joined_matrix(form):
    """Parts of 32 and of 96 rows or columns: a tile of 128 in the blocked layout of scales holds several parts."""
    side_by_side = [ugly(43, columns, seed=columns, dtype=torch.bfloat16) for columns in (96, 32)]
    check_mxfp8(side_by_side, 1, (1, 0), form, "floor")
    check_mxfp8([ugly(rows, 64, seed=rows) for rows in (96, 32, 64)], 0, (1, 0), form, column_factor=draw(64))


@pytest.mark.parametrize("form", ["codes", "blocked"])
def test_stacked_experts_are_joined_one_by_one(form):
    """Three experts of 64 and of 32 rows: a tile of 128 in the blocked layout of scales holds parts of two experts."""
    parts = [ugly(3 * rows, 96, seed=rows) for rows in (64, 32)]
    assert torch.equal(joined(parts, 0, 3)[96:160], parts[0][64:128])
    for dims in ((1,), (1, 0)):
        check_mxfp8(parts, 0, dims, form, experts=3, column_factor=draw(96))


def test_views_no_tokens_and_one_part():
    check_mxfp8([part.t() for part in (draw(64, 5), draw(32, 5))], 1, (1, 0), "blocked")
    check_mxfp8([draw(0, 64), draw(0, 32)], 1, (1, 0), "blocked")
    check_mxfp8([draw(32, 32)], 0, (1, 0), "blocked")


def powers(*exponents: list[int]) -> torch.Tensor:
    return torch.tensor(exponents).float().exp2()


def test_gradients_side_by_side_with_their_own_scales_and_bits():
    """The random bits of an element depend on its position in its own matrix, and on the key of this matrix."""
    parts = [draw(5, columns, seed=columns) for columns in (48, 16)]
    scales = powers([-6, -4], [-3, -5])
    draws = [torch.tensor([key, 5, 2, 1]) for key in (7, 8)]
    signs = torch.tensor(0b1010011)
    with poisoned_memory():
        images = nvfp4_cast(parts, scales, "image", signs=signs, draws=draws, axis=1)
    alone = [
        nvfp4_cast([part], scales[i : i + 1], "image", signs=signs, draws=[draws[i]]) for i, part in enumerate(parts)
    ]
    assert images.keys() == {1, 0}
    for dim, image in images.items():
        assert_same_bits(image.data, torch.cat([results[dim].data for results in alone], 1))


def test_weights_one_below_the_other():
    parts, scales, gain = [ugly(rows, 48, seed=rows) for rows in (32, 16)], powers([3], [-2]), draw(48)
    with poisoned_memory():
        tiles = nvfp4_weight(parts, scales, "image", gain)[1].data
        rows = nvfp4_cast(parts, scales, "image", (1,), column_factor=gain)[1].data
    alone = [nvfp4_weight([w], s[None], "image", gain)[1].data for w, s in zip(parts, scales)]
    assert_same_bits(tiles, torch.cat(alone))
    alone = [nvfp4_cast([w], s[None], "image", (1,), column_factor=gain)[1].data for w, s in zip(parts, scales)]
    assert_same_bits(rows, torch.cat(alone))
