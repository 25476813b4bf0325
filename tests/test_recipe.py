import dataclasses

import pytest

from mxtrain import ConfigError, Recipe
from mxtrain.formats import MXFP8, NVFP4, norm_constant
from mxtrain.recipe import RECIPES, SWITCHES, RMSEstimate, get_recipe


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


def test_the_recipe_of_nvfp4():
    recipe = get_recipe("nvfp4")
    assert recipe.format == NVFP4 and recipe.block_size == 16 and recipe.is_nvfp4 and recipe.needs_seeds
    assert [getattr(recipe, switch) for switch in SWITCHES] == [None, "static", True, True, True, 0.15]
    assert dataclasses.replace(get_recipe("nvfp4_dynamic"), name="nvfp4", tensor_scale="static") == recipe
    assert not get_recipe("mxfp8").is_nvfp4 and not get_recipe("mxfp8").needs_seeds


@pytest.mark.parametrize(
    ("switch", "value"),
    [("tensor_scale", "dynamic"), *((s, False) for s in ("weight_tiles", "hadamard", "stochastic_rounding"))],
)
def test_every_switch_of_nvfp4_is_one_setting(switch, value):
    recipe = get_recipe("nvfp4", **{switch: value}, **dict.fromkeys(set(SWITCHES) - {switch}))
    assert recipe == dataclasses.replace(RECIPES["nvfp4"], **{switch: value}) != RECIPES["nvfp4"]


def test_any_recipe_can_leave_blocks_in_high_precision():
    assert get_recipe("mxfp8", high_precision_share=0.25).high_precision_share == 0.25
    assert get_recipe("nvfp4", high_precision_share=0).high_precision_share == 0


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: get_recipe("mxfp9"), r"recipe = 'mxfp9' is not one of: 'mxfp8', 'unquantized'"),
        (lambda: get_recipe("mxfp8", "ceil"), r"scale_rounding = 'ceil' is not one of: 'rceil', 'floor'"),
        (lambda: get_recipe("nvfp4", "rceil"), r"scale_rounding = 'rceil' does not apply to recipe 'nvfp4'"),
        (lambda: get_recipe("nvfp4", tensor_scale="fixed"), r"tensor_scale = 'fixed' is not one of: 'static', 'dyn"),
        (lambda: get_recipe("mxfp8", tensor_scale="static"), r"tensor_scale = 'static' needs recipe 'nvfp4', not 'mx"),
        (lambda: get_recipe("mxfp8", hadamard=True), r"hadamard = True needs recipe 'nvfp4', not 'mxfp8'"),
        (lambda: get_recipe("unquantized", weight_tiles=True), r"weight_tiles = True needs recipe 'nvfp4'"),
        (lambda: get_recipe("nvfp4", hadamard="no"), r"hadamard = 'no' is not one of: True, False"),
        (lambda: get_recipe("nvfp4", high_precision_share=1), r"high_precision_share = 1 is not a number from 0 to"),
        (lambda: get_recipe("nvfp4", high_precision_share="0.1"), r"high_precision_share = '0.1' is not a number"),
        (lambda: RMSEstimate.for_recipe(RECIPES["nvfp4"], 2, "post_round"), r"those of recipe = 'nvfp4' follow from"),
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
