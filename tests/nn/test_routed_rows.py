"""Rows of a norm's result as bytes stand for the values that its linears multiply."""

import pytest
import torch

from mxtrain import MXNorm
from mxtrain.formats.matrices import Codes
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.normed_input import NormedInput, RoutedRows, pack, unpack
from tests.support.casts import cast
from tests.support.expert_checks import heavy_tailed
from tests.support.layer_checks import draw

TOKENS, DIM = 48, 96
INDEX = torch.tensor([3, 3, 47, 0, 20])


def normed_rows(mode: str, dtype: torch.dtype, recipe="mxfp8") -> tuple[NormedInput, torch.Tensor]:
    """A norm's result with a NaN in one row, and x. No CPU has a native mode, so its operand is put in."""
    norm = MXNorm(DIM, recipe=recipe, mode="reference" if mode == "native" else mode)
    norm.feeds_mixture = norm.sends_codes = True
    x = heavy_tailed(TOKENS, DIM, seed=0, dtype=dtype)
    x[20, 5] = torch.nan
    x.requires_grad_()
    normed = norm(x)
    if mode == "native":
        operand, _ = norm.recipe.fprop.ops.normalize(x.detach(), norm.estimate, normed.recipe, mode)
        normed = normed._replace(xhat=operand, mode=mode)
    return normed, x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("recipe", "mode"),
    [*(("mxfp8", mode) for mode in ("reference", "emulated", "native")), ("mxfp4", "reference"), ("mxfp4", "emulated")],
)
def test_rows_have_the_values_and_the_gradient_of_rows_in_high_precision(recipe, mode, dtype):
    normed, x = normed_rows(mode, dtype, recipe)
    rows, want = normed[INDEX], normed._replace(sends_codes=False)[INDEX]
    size = DIM // (2 if recipe == "mxfp4" else 1) + DIM // 32
    assert isinstance(rows, RoutedRows) and rows.packed.shape == (TOKENS, size)
    values = rows.values()
    assert values.dtype == dtype and torch.equal(values[INDEX].nan_to_num(7), want.nan_to_num(7))
    assert want.isnan().any() and not want[:4].isnan().any()
    dy = draw(len(INDEX), DIM, seed=1).to(dtype)
    got, expected = (torch.autograd.grad(y, x, dy, retain_graph=True)[0] for y in (values[INDEX], want))
    assert torch.equal(got.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("recipe", ["unquantized", "fprop=bf16, dgrad=mxfp8, wgrad=mxfp8"])
def test_a_recipe_without_codes_gives_values(recipe):
    normed, _ = normed_rows("reference", torch.float32, recipe)
    assert isinstance(normed[INDEX], torch.Tensor)


@pytest.mark.parametrize("dim, size", [(7168, 7392), (32, 33), (2048, 2112)])
def test_a_row_is_its_codes_and_scales(dim, size):
    x = draw(3, dim, seed=2)
    codes = cast([x], get_recipe("mxfp8"), "reference", (1,), as_codes=True)[1]
    packed = pack(Codes(*codes))
    assert packed.shape == (3, size) and packed.dtype == torch.uint8
    image = cast([x], get_recipe("mxfp8"), "reference", (1,))[1].data
    assert torch.equal(unpack(packed, MXFP8, torch.float32), image)
    assert not unpack(torch.zeros_like(packed), MXFP8, torch.bfloat16).any()
