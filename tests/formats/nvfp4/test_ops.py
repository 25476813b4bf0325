"""NVFP4 casts of groups of rows, which have the bits that they have alone, and of parts of one matrix."""

from itertools import pairwise

import pytest
import torch

from mxtrain.formats.matrices import CastSpec
from mxtrain.formats.nvfp4 import ops as nvfp4
from mxtrain.formats.parse import get_recipe
from tests.support.expert_checks import heavy_tailed

pytestmark = pytest.mark.usefixtures("device")

ENDS, ROWS, COLUMNS = (16, 32, 64), 80, 16
RECIPE = get_recipe("nvfp4")
FOUR_OVER_SIX = get_recipe("nvfp4", four_over_six="both", weight_tiles=False)
GRADIENT = dict(dims=(1, 0), signs=0b1010011, keys=(7, 2**62, -3))
CASTS = {
    "gradient": (RECIPE, GRADIENT),
    "to nearest": (get_recipe("nvfp4", stochastic_rounding=False), GRADIENT),
    "weight": (RECIPE, dict(dims=(1, 0), role="weight")),
    "weight by four over six": (FOUR_OVER_SIX, dict(dims=(1, 0), role="weight")),
    "input by four over six": (FOUR_OVER_SIX, dict(dims=(1, 0), signs=0b1010011)),
    "weight without tiles": (get_recipe("nvfp4", weight_tiles=False), dict(dims=(0,), role="weight")),
}


def cast(x, recipe, mode, dims, keys=(), signs=None, ends=None, **settings):
    draws = [torch.tensor([[key, 5, 2, 1] for key in keys])] if keys else None
    if ends is None and draws is not None:
        draws = [draws[0][0]]
    signs = None if signs is None else torch.tensor(signs)
    spec = CastSpec(draws=draws, signs=signs, ends=ends, **settings)
    found = recipe.ops.cast([x], recipe, mode, dims, spec)
    values = {dim: operand.data if dim == 1 else operand.data.t() for dim, operand in found.items()}
    if recipe is not FOUR_OVER_SIX:
        return values
    # Rows beyond the last end have the scale of the last group.
    groups = torch.searchsorted(torch.tensor([ROWS]) if ends is None else ends[:-1], torch.arange(ROWS), right=True)
    scales = {dim: operand.tensor_scale.view(-1)[groups[: len(x)]] for dim, operand in found.items()}
    return {dim: data.float() * scales[dim][:, None] for dim, data in values.items()}


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize(("recipe", "settings"), CASTS.values(), ids=CASTS)
def test_every_group_has_the_bits_that_it_has_alone(recipe, settings, mode, monkeypatch):
    """The emulated casts are by kernels, those of single groups in PyTorch. The last rows belong to no group."""
    x = heavy_tailed(ROWS, COLUMNS, seed=0) * torch.arange(ROWS)[:, None].div(16, rounding_mode="floor").exp()
    x[20, 3], x[ENDS[-1] :] = float("nan"), float("nan")
    got = cast(x, recipe, mode, ends=torch.tensor(ENDS, dtype=torch.int32), **settings)
    monkeypatch.setattr(nvfp4, "runs_kernels", lambda *_: False)
    for group, (start, end) in enumerate(pairwise((0, *ENDS))):
        keys = settings.get("keys", ())[group : group + 1]
        alone = cast(x[start:end], recipe, mode, **{**settings, "keys": keys})
        assert alone.keys() == got.keys()
        for dim, want in alone.items():
            assert torch.equal(got[dim][start:end].nan_to_num(7), want.nan_to_num(7))
            assert want.isnan().all() if group == 1 else want.any() and not want.isnan().any()


@pytest.mark.parametrize(
    ("recipe", "settings"),
    [CASTS["gradient"], CASTS["weight"], (get_recipe("nvfp4_row"), dict(dims=(1, 0)))],
    ids=["gradient", "weight", "input with scales of rows"],
)
def test_larger_parts_on_other_processes_raise_the_scale(recipe, settings, monkeypatch):
    monkeypatch.setattr(nvfp4, "largest", lambda found, group: found * 2**30 if group else found)
    x, settings = heavy_tailed(32, COLUMNS, seed=0), {**settings, "keys": settings.get("keys", ())[:1]}
    own, got = (cast(x, recipe, "emulated", group=group, **settings) for group in (None, "all"))
    monkeypatch.setattr(nvfp4, "runs_kernels", lambda *_: False)
    for dim, want in cast(x, recipe, "emulated", group="all", **settings).items():
        assert torch.equal(got[dim], want) and not torch.equal(own[dim], want)
