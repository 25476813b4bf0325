import pytest

from mxtrain import ConfigError
from mxtrain.conversion.selection import in_last_blocks, matches, recipes_of_linears, selected
from mxtrain.recipes.recipe import RECIPES


@pytest.mark.parametrize(
    ("fqn", "pattern", "expected"),
    [
        ("layers.1.attention.wq", "layers.1", True),
        ("layers.10.attention.wq", "layers.1", False),
        ("layers.10.attention.wq", "layers.1*", True),
        ("layers.3.attention.wq", "layers.[0-3]", True),
        ("layers.3.attention.wq", "wq", True),
        ("layers.3.attention.wq", "w", False),
        ("layers.3.attention.wq", "attention.*", True),
        ("layers.3.attention", "attention.*", False),
        ("output", "out", False),
        ("output", "output", True),
    ],
)
def test_matches_whole_segments(fqn, pattern, expected):
    assert matches(fqn, pattern) is expected


MODULES = ("embedding", "layers", *(f"layers.{i}{part}" for i in range(12) for part in ("", ".norm", ".wo")), "output")
NAMES = {**dict(zip(MODULES, MODULES)), "head": "output", "tower.0.wo": "layers.0.wo"}
LINEARS = tuple(fqn for fqn in MODULES if fqn.endswith(("wo", "output")))


def test_selected_modules_are_in_the_models_order():
    assert selected(NAMES, "layers.1", "filter_fqns") == ["layers.1", "layers.1.norm", "layers.1.wo"]
    assert selected(NAMES, "norm", "filter_fqns") == [f"layers.{i}.norm" for i in range(12)]
    assert selected(NAMES, "head", "filter_fqns") == ["output"], "a module is selected by any of its names"
    assert selected(NAMES, "wo", "filter_fqns") == [f"layers.{i}.wo" for i in range(12)], "and only once"
    with pytest.raises(ConfigError, match="^field: 'wq' matches no module; the top-level modules are: embedding, lay"):
        selected(NAMES, "wq", "field")


def test_the_last_pattern_that_matches_a_linear_wins():
    mxfp8, nvfp4, bf16 = RECIPES["mxfp8"], RECIPES["nvfp4"], RECIPES["bf16"]
    by_pattern = {"layers.[0-3]": nvfp4, "layers.2": bf16, "output": bf16}
    chosen = recipes_of_linears(NAMES, LINEARS, mxfp8, by_pattern)
    assert chosen.keys() == set(LINEARS)
    assert chosen["layers.1.wo"] == (nvfp4, "recipes.'layers.[0-3]' = 'nvfp4'")
    assert chosen["layers.2.wo"] == (bf16, "recipes.'layers.2' = 'bf16'")
    assert chosen["layers.4.wo"] == (mxfp8, "recipe = 'mxfp8'")
    with pytest.raises(ConfigError, match="^recipes: 'norm' names no linear layer"):
        recipes_of_linears(NAMES, LINEARS, mxfp8, {"norm": nvfp4})


@pytest.mark.parametrize(
    ("share", "blocks", "count"), [(0.15, 12, 2), (0.15, 32, 5), (0.15, 3, 0), (0.5, 3, 2), (0, 4, 0), (0.34, 3, 1)]
)
def test_a_share_of_the_blocks_is_rounded_to_nearest(share, blocks, count):
    names = [f"layers.{i}" for i in range(blocks)]
    kept = in_last_blocks([*names, "layers.0.wo", f"layers.{blocks - 1}.wo"], names, share)
    last = {*names[blocks - count :], f"layers.{blocks - 1}.wo"} if count else set()
    assert kept.keys() == last
    assert set(kept.values()) <= {f"in the last {count} of {blocks} blocks (high_precision_share = {share})"}


def test_a_block_whose_name_begins_as_a_kept_one_is_not_kept():
    assert in_last_blocks(["layers.ab.wo", "layers.a.wo"], ["layers.ab", "layers.a"], 0.5).keys() == {"layers.a.wo"}
