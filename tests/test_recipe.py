import dataclasses

import pytest

from mxtrain import ConfigError, Recipe
from mxtrain.formats import MXFP8, norm_constant
from mxtrain.recipe import RECIPES, RMSEstimate, get_recipe


def test_named_recipes_are_keyed_by_their_names_and_frozen():
    for name, recipe in RECIPES.items():
        assert recipe.name == name
        with pytest.raises(dataclasses.FrozenInstanceError):
            recipe.name = "other"


def test_scale_rounding_overrides_the_named_recipe_only_when_given():
    assert get_recipe("mxfp8").scale_rounding == "rceil"
    floor = get_recipe("mxfp8", "floor")
    assert floor.scale_rounding == "floor"
    assert get_recipe(floor) is floor


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: get_recipe("mxfp9"), r"recipe = 'mxfp9' is not one of: 'mxfp8', 'unquantized'"),
        (lambda: get_recipe("mxfp8", "ceil"), r"scale_rounding = 'ceil' is not one of: 'rceil', 'floor'"),
        (lambda: Recipe("mine", MXFP8, 32, "up"), r"scale_rounding = 'up' is not one of"),
        (lambda: RMSEstimate(3, "pre_round", 1e-5, 32), r"p = 3 is not one of: 1, 2"),
        (lambda: RMSEstimate("2", "pre_round", 1e-5, 32), r"p = '2' is not one of"),
        (lambda: RMSEstimate(2, "mean", 1e-5, 32), r"estimator = 'mean' is not one of: 'pre_round'"),
        (lambda: RMSEstimate(2, "exact", -1.0, 32), r"eps = -1.0 is not a finite number"),
        (lambda: RMSEstimate(2, "exact", float("nan"), 32), r"eps = nan is not a finite number"),
        (lambda: RMSEstimate.for_recipe(RECIPES["unquantized"], 2, "post_round"), r"'unquantized' has none"),
    ],
)
def test_mistakes_name_the_field_and_the_choices(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_estimate_carries_its_constant():
    estimate = RMSEstimate.for_recipe(RECIPES["mxfp8"], p=1)
    assert estimate.constant == norm_constant(1, 32)
