"""NVFP4 images of several matrices in one: every part has the bits of its own cast."""

import pytest
import torch

from mxtrain.kernels.nvfp4.cast import nvfp4_cast
from mxtrain.kernels.nvfp4.joined_cast import nvfp4_joined_cast, nvfp4_joined_weight
from mxtrain.kernels.nvfp4.weight_cast import nvfp4_weight
from mxtrain.rng.rounding_position import Draws
from tests.support.kernel_checks import assert_same_bits, draw, kernel_tests, poisoned_memory, ugly

pytestmark = kernel_tests


def scale(exponent: int) -> torch.Tensor:
    return torch.tensor(2.0**exponent)


def test_gradients_side_by_side_with_their_own_scales_and_bits():
    """The random bits of an element depend on its position in its own matrix, and on the key of this matrix."""
    parts = [draw(5, columns, seed=columns) for columns in (48, 16)]
    scales = {1: [scale(-6), scale(-3)], 0: [scale(-4), scale(-5)]}
    draws = [torch.tensor([key, 5, 2, 1]) for key in (7, 8)]
    signs = torch.tensor(0b1010011)
    for dims in ((1, 0),):
        chosen = {dim: scales[dim] for dim in dims}
        with poisoned_memory():
            images = nvfp4_joined_cast(parts, 1, chosen, signs=signs, draws=draws)
        alone = [
            nvfp4_cast(part, {dim: scales[dim][i] for dim in dims}, "image", signs=signs, draws=draws[i])
            for i, part in enumerate(parts)
        ]
        assert images.keys() == chosen.keys()
        for dim, image in images.items():
            assert_same_bits(image, torch.cat([results[dim].data for results in alone], 1))


def test_weights_one_below_the_other():
    parts, scales, gain = [ugly(rows, 48, seed=rows) for rows in (32, 16)], [scale(3), scale(-2)], draw(48)
    with poisoned_memory():
        tiles = nvfp4_joined_weight(parts, scales, gain)
        rows = nvfp4_joined_cast(parts, 0, {1: scales}, column_factor=gain)[1]
    alone = [nvfp4_weight(w, s, "image", gain).data for w, s in zip(parts, scales)]
    assert_same_bits(tiles, torch.cat(alone))
    alone = [nvfp4_cast(w, {1: s}, "image", column_factor=gain)[1].data for w, s in zip(parts, scales)]
    assert_same_bits(rows, torch.cat(alone))


@pytest.mark.parametrize(
    ("shape", "scales", "message"),
    [
        ((24, 16), 2, "multiple of 16"),
        ((16, 24), 2, "multiple of 16"),
        ((16, 16), 1, "1 tensor scales for 2 parts"),
    ],
    ids=["rows", "columns", "scales"],
)
def test_wrong_parts(shape, scales, message):
    parts, scales = [draw(*shape)] * 2, [scale(0)] * scales
    with pytest.raises(ValueError, match=message):
        nvfp4_joined_weight(parts, scales)
    with pytest.raises(ValueError, match=message):
        nvfp4_joined_cast(parts, 0, {1: scales})


def test_every_part_needs_its_draws_and_there_is_a_part():
    parts, scales, draws = [draw(16, 16)] * 2, [scale(0)] * 2, torch.zeros(len(Draws), dtype=torch.int64)
    for given in ([draws], [draws] * 3):
        with pytest.raises(ValueError, match=f"^{len(given)} draws for 2 parts: expected one for each, or None$"):
            nvfp4_joined_cast(parts, 0, {1: scales}, draws=given)
    for call in (lambda: nvfp4_joined_cast([], 0, {1: []}), lambda: nvfp4_joined_weight([], [])):
        with pytest.raises(ValueError, match="^no parts: expected one matrix or more$"):
            call()


def test_a_wrong_gain_is_called_by_its_name():
    with pytest.raises(ValueError, match=r"^gain \(5,\) of torch.float32: expected \(16,\)"):
        nvfp4_joined_weight([draw(16, 16)], [scale(0)], draw(5))
