import dataclasses
import pickle

import pytest
import torch

from mxtrain import ConfigError
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mxfp8 import MXFP8_E5M2
from mxtrain.formats.parse import SWITCHES, get_recipe, get_recipes, switches_in_effect
from mxtrain.formats.recipe import DEQUANTIZED, FORMATS, GEMMS, RECIPES, MixedRecipe
from mxtrain.launch import _REGISTERED, from_key


def test_scale_rounding_overrides_the_named_recipe_only_when_given():
    assert get_recipe("mxfp8").scale_rounding == "rceil"
    floor = get_recipe("mxfp8", scale_rounding="floor")
    assert floor.scale_rounding == "floor"
    assert get_recipe(floor) is floor


@pytest.mark.parametrize(
    ("switch", "value"),
    [
        ("tensor_scale", "dynamic"),
        ("four_over_six", "both"),
        ("four_over_six_error", "mse"),
        *((s, False) for s in ("weight_tiles", "hadamard", "stochastic_rounding")),
    ],
)
def test_every_switch_of_nvfp4_is_one_setting(switch, value):
    recipe = get_recipe("nvfp4", **{switch: value}, **dict.fromkeys(set(SWITCHES) - {switch}))
    assert recipe == dataclasses.replace(RECIPES["nvfp4"], **{switch: value}) != RECIPES["nvfp4"]


def test_a_plain_recipe_applies_to_all_three_gemms():
    for recipe in RECIPES.values():
        assert isinstance(recipe, MixedRecipe) or recipe.gemms == (recipe, recipe, recipe)


def test_a_spec_names_a_recipe_for_every_gemm_in_any_order():
    mixed = get_recipe("fprop=nvfp4, dgrad=mxfp8, wgrad=bf16")
    assert mixed == MixedRecipe(RECIPES["nvfp4"], RECIPES["mxfp8"], RECIPES["bf16"])
    assert mixed == get_recipe(" wgrad = bf16,fprop=nvfp4 ,dgrad=mxfp8") == get_recipe(mixed) == get_recipe(mixed.name)
    assert mixed.name == "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16"
    assert str(mixed) == "fprop=nvfp4/static/weight_tiles/hadamard/stochastic_rounding, dgrad=mxfp8/rceil, wgrad=bf16"
    with pytest.raises(dataclasses.FrozenInstanceError):
        mixed.fprop = RECIPES["mxfp8"]


@pytest.mark.parametrize("name", [name for name, recipe in RECIPES.items() if recipe.fprop.only == GEMMS])
def test_a_spec_with_one_name_three_times_is_that_recipe(name):
    assert get_recipe(", ".join(f"{gemm}={name}" for gemm in GEMMS)) == RECIPES[name]


@pytest.fixture
def named(monkeypatch):
    """A recipe for each GEMM under the name "mine"; its fprop has settings of its own."""
    fprop = dataclasses.replace(RECIPES["nvfp4_dynamic"], name="mine", high_precision_share=0.0)
    recipe = MixedRecipe(fprop, DEQUANTIZED, RECIPES["mxfp8"], "mine")
    monkeypatch.setitem(RECIPES, "mine", recipe)
    return recipe


def test_a_mixed_recipe_may_have_a_name(named):
    assert get_recipe("mine") == get_recipe(named) == named and get_recipe("mine").name == "mine"
    assert get_recipe("mine", hadamard=False).name == "mine" and get_recipe("mine").high_precision_share == 0
    parts = get_recipe("fprop=mine, dgrad=mine, wgrad=mine")
    assert parts == named and parts.name == "fprop=mine, dgrad=dequantized, wgrad=mxfp8"
    assert get_recipe("fprop=bf16, dgrad=bf16, wgrad=mine").wgrad is RECIPES["mxfp8"]


def test_a_backward_that_dequantizes_takes_the_place_of_formats():
    recipe = get_recipe("nvfp4", backward="dequantized")
    assert recipe == get_recipe("fprop=nvfp4, dgrad=dequantized, wgrad=dequantized") == get_recipe(recipe)
    assert recipe.joins("emulated") and not recipe.needs_draws and recipe.high_precision_share == 0.15
    assert get_recipe("fprop=mxfp8, dgrad=bf16, wgrad=mxfp8", backward="dequantized").gemms == (
        RECIPES["mxfp8"],
        RECIPES["bf16"],
        DEQUANTIZED,
    )
    high_precision = get_recipe("fprop=bf16, dgrad=dequantized, wgrad=dequantized")
    assert high_precision is get_recipe("bf16", backward="dequantized") is RECIPES["bf16"], "with nothing to decode"
    assert get_recipe("mxfp8", backward="quantized") == RECIPES["mxfp8"]


def test_output_gradients_may_have_a_format_of_their_own():
    spec = "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2"
    recipe = get_recipe(spec, scale_rounding="floor")
    own = recipe.dgrad.of_gradients
    assert str(recipe) == "fprop=mxfp8/floor, dgrad=mxfp8_e5m2/floor, wgrad=mxfp8_e5m2/floor" and recipe.name == spec
    assert (recipe.dgrad.format, own.format, own.scale_rounding) == (FORMATS["mxfp8"], MXFP8_E5M2, "floor")
    assert recipe.fprop.of_gradients is recipe.fprop != recipe.dgrad == recipe.wgrad
    assert get_recipe("fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=bf16").dgrad == RECIPES["mxfp8_e5m2"]


def test_a_fixed_transform_needs_no_seeds():
    recipe = get_recipe("mxfp4")
    assert recipe.hadamard and not recipe.needs_signs and get_recipe("nvfp4").needs_signs
    assert str(recipe) == "mxfp4/rceil/hadamard" and str(get_recipe("mxfp4", hadamard=False)) == "mxfp4/rceil"


def test_a_number_of_blocks_takes_the_place_of_a_share():
    recipe = get_recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4", high_precision_last=4)
    assert (recipe.high_precision_share, recipe.high_precision_last) == (0, 4)
    again = get_recipe(recipe, high_precision_share=0.5)
    assert (again.high_precision_share, again.high_precision_last) == (0.5, 0)


def test_high_precision_share_if_any_gemm_is_nvfp4():
    assert get_recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4").high_precision_share == 0.15
    assert get_recipe("fprop=mxfp8, dgrad=bf16, wgrad=bf16").high_precision_share == 0
    assert get_recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=nvfp4", high_precision_share=0).high_precision_share == 0


def test_switches_reach_the_gemms_whose_format_has_them():
    mixed = get_recipe("fprop=nvfp4, dgrad=mxfp8, wgrad=nvfp4", scale_rounding="floor", hadamard=False)
    assert mixed.dgrad == get_recipe("mxfp8", scale_rounding="floor")
    assert mixed.fprop == mixed.wgrad == get_recipe("nvfp4", hadamard=False)
    tiles = get_recipe("fprop=mxfp8, dgrad=nvfp4, wgrad=mxfp8", weight_tiles=True)
    assert tiles.dgrad == RECIPES["nvfp4"] and tiles.fprop == get_recipe("mxfp8", weight_tiles=True)
    assert str(RECIPES["mxfp8_2d"]) == "mxfp8_2d/rceil/weight_tiles"
    assert [RECIPES["mxfp8_2d"].has_tiles(role) for role in ("input", "weight", "gradient")] == [False, True, False]
    default, others = get_recipes("mxfp8", {"wo": "nvfp4", "w2": mixed}, scale_rounding="floor", weight_tiles=False)
    assert default == get_recipe("mxfp8", scale_rounding="floor") and others["wo"] == get_recipe(
        "nvfp4", weight_tiles=False
    )
    assert list(others) == ["wo", "w2"] and others["w2"].dgrad == default
    assert others["w2"].wgrad == get_recipe("nvfp4", hadamard=False, weight_tiles=False)


def test_switches_in_effect_come_from_the_gemms_that_they_change():
    off = ("weight_tiles", "hadamard", "stochastic_rounding", "four_over_six")
    none = dict.fromkeys(SWITCHES) | dict.fromkeys(off, False)
    none["high_precision_last"] = 0
    forward = get_recipe("fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8")
    expected = {"scale_rounding": "rceil", "tensor_scale": "static", "weight_tiles": True, "high_precision_share": 0.15}
    expected |= {"backward": "quantized", "four_over_six_error": "mae"}
    assert switches_in_effect([forward]) == none | expected
    assert switches_in_effect([get_recipe(forward, backward="dequantized")])["backward"] == "dequantized"
    assert switches_in_effect([RECIPES["unquantized"]])["backward"] is None
    backward = get_recipe("fprop=bf16, dgrad=bf16, wgrad=nvfp4", stochastic_rounding=False)
    both = switches_in_effect([get_recipe("mxfp8", scale_rounding="floor"), forward, backward])
    first = {"scale_rounding": "floor", "weight_tiles": False, "hadamard": True, "high_precision_share": 0.0}
    assert both == none | expected | first


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (
            lambda: get_recipe("mxfp9"),
            r"recipe = 'mxfp9' is not one of: 'mxfp8', 'mxfp8_2d', 'mxfp8_e5m2', 'unquantized'",
        ),
        (
            lambda: get_recipe("mxfp8", scale_rounding="ceil"),
            r"scale_rounding = 'ceil' is not one of: 'rceil', 'rceil_0_18', 'floor'",
        ),
        (
            lambda: get_recipe("nvfp4", scale_rounding="rceil"),
            r"scale_rounding = 'rceil' does not apply to recipe 'nvfp4'",
        ),
        (lambda: get_recipe("mxfp8", tensor_scale="static"), r"tensor_scale = 'static' needs recipe 'nvfp4', not 'mx"),
        (lambda: get_recipe("mxfp8", hadamard=True), r"hadamard = True needs recipe 'nvfp4', not 'mxfp8'"),
        (
            lambda: get_recipe("nvfp4", four_over_six="gradients"),
            r"= 'gradients' is not one of: False, 'weights', 'act",
        ),
        (
            lambda: get_recipe("mxfp8", four_over_six="both"),
            r"^four_over_six = 'both' needs recipe 'nvfp4', not 'mxfp8'$",
        ),
        (lambda: get_recipe("nvfp4", high_precision_share=1), r"high_precision_share = 1 is not a number from 0 to"),
        (lambda: RMSEstimate.for_recipe(RECIPES["nvfp4"], 2, "post_round"), r"those of recipe = 'nvfp4' follow from"),
        (lambda: RMSEstimate(2, "mean", 1e-5, 32), r"estimator = 'mean' is not one of: 'pre_round'"),
        (lambda: RMSEstimate(2, "exact", -1.0, 32), r"eps = -1.0 is not a finite number"),
        (lambda: RMSEstimate.for_recipe(RECIPES["unquantized"], 2, "post_round"), r"'unquantized' has none"),
        (lambda: get_recipe("mxfp8", hadamrd=True), r"setting of a recipe = 'hadamrd' is not one of: 'scale_rounding'"),
        (
            lambda: get_recipe("fprob=nvfp4, dgrad=mxfp8, wgrad=mxfp8"),
            r"^recipe = 'fprob=nvfp4, .*': GEMM = 'fprob' is not one of: 'fprop', 'dgrad', 'wgrad'$",
        ),
        (
            lambda: get_recipe("fprop=mx"),
            r"^recipe = 'fprop=mx': fprop = 'mx' is not one of: 'mxfp8', .*'nvfp4'.*'bf16'$",
        ),
        (
            lambda: get_recipe("dgrad=mxfp8, dgrad=bf16"),
            r"^recipe = 'dgrad=mxfp8, dgrad=bf16' names dgrad twice; name it once$",
        ),
        (lambda: get_recipe("dgrad=mxfp8"), r"leaves out fprop and wgrad; name all of fprop, dgrad, wgrad$"),
        (
            lambda: get_recipe("fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8", hadamard=True),
            r"^hadamard = True needs recipe 'nvfp4' for wgrad, not 'fprop=nvfp4, dgrad=mxfp8, wgrad=",
        ),
        (
            lambda: get_recipe("fprop=bf16, dgrad=bf16, wgrad=mxfp8", weight_tiles=True),
            r"^weight_tiles = True needs recipe 'mxfp8' for fprop or dgrad, not 'fprop=bf16, ",
        ),
        (
            lambda: get_recipes("mxfp8", {"wo": "bf16"}, stochastic_rounding=True),
            r"^stochastic_rounding = True needs recipe 'nvfp4' for dgrad or wgrad, not 'mxfp8', 'bf16'; leave",
        ),
        (
            lambda: get_recipe("fprop=nvfp4, dgrad=nvfp4_dynamic, wgrad=nvfp4", scale_rounding="floor"),
            r"^scale_rounding = 'floor' needs a format whose block scales are powers of two for fprop or dgrad or",
        ),
        (lambda: get_recipes("mxfp8", {"wo": "mx"}), r"^recipes.'wo' = 'mx' is not one of: 'mxfp8'"),
        (
            lambda: get_recipes("mxfp8", {"layers": {"0": "bf16"}}),
            r"^recipes.'layers' = {'0': 'bf16'} is not a string: wr",
        ),
        (lambda: get_recipes("mxfp8", "bf16"), r"^recipes = 'bf16' is not a table of lines"),
        (
            lambda: get_recipe("dequantized"),
            r"^recipe = 'dequantized' is not for fprop; write 'fprop=mxfp8, dgrad=dequantized, wgrad=dequantized'$",
        ),
        (
            lambda: get_recipe("mxfp8_e5m2"),
            r"^recipe = 'mxfp8_e5m2' is not for fprop; write 'fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2'$",
        ),
        (
            lambda: get_recipe("fprop=mxfp8_e5m2, dgrad=mxfp8, wgrad=mxfp8"),
            r"fprop = 'mxfp8_e5m2' is not for fprop; write 'fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2'$",
        ),
        (
            lambda: dataclasses.replace(RECIPES["mxfp4"], gradient_format=MXFP8_E5M2),
            r"^gradient_format = Format\('mxfp8_e5m2'\) is not a gradient format beside MXFP4; leave it unset$",
        ),
        (lambda: get_recipe(DEQUANTIZED), r"^recipe = 'dequantized' is not for fprop; write"),
        (lambda: get_recipe("fprop=dequantized"), r"^recipe = 'fprop=dequantized': fprop = 'dequantized' is not for"),
        (lambda: get_recipe("mxfp8", backward="bf16"), r"^backward = 'bf16' is not one of: 'quantized', 'dequantized'"),
        (
            lambda: get_recipe("fprop=mxfp8, dgrad=mxfp8, wgrad=dequantized", backward="quantized"),
            r"^backward = 'quantized' gives wgrad no format; name a recipe, as in 'wgrad=mxfp8'$",
        ),
        (
            lambda: get_recipe("nvfp4", backward="dequantized", stochastic_rounding=True),
            r"^stochastic_rounding = True needs recipe 'nvfp4' for dgrad or wgrad, not 'fprop=nvfp4, dgr",
        ),
        (
            lambda: get_recipe("nvfp4", high_precision_share=0.5, high_precision_last=4),
            r"^high_precision_share = 0.5 and high_precision_last = 4 are both set; leave one of them unset$",
        ),
        (
            lambda: get_recipe("nvfp4", high_precision_last=-1),
            r"^high_precision_last = -1 is not a number of blocks",
        ),
    ],
)
def test_mistakes_name_the_field_and_the_choices(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_an_object_is_found_by_its_key_also_after_a_copy_from_another_process():
    mixed = get_recipe("fprop=nvfp4_dynamic, dgrad=bf16, wgrad=mxfp8")
    for keyed in (mixed, mixed.fprop, RMSEstimate(1, "exact", 0.25, 32)):
        copy = pickle.dumps(keyed)
        _REGISTERED.pop(keyed.key)
        assert pickle.loads(copy) == keyed == from_key(keyed.key)
    assert RMSEstimate(1, "exact", 0.25, 32).key != RMSEstimate(1, "exact", 0.5, 32).key


def test_objects_are_equal_if_their_compared_fields_are():
    recipe, estimate = RECIPES["mxfp8"], RMSEstimate(2, "exact", 1e-5, 32)
    mixed = MixedRecipe(recipe, recipe, RECIPES["nvfp4"])
    for one in (recipe, mixed, estimate):
        assert one == dataclasses.replace(one) and len({one, dataclasses.replace(one)}) == 1
    assert recipe == dataclasses.replace(recipe, high_precision_share=0.5)
    for other in (
        RECIPES["nvfp4"],
        MixedRecipe(recipe, recipe, recipe),
        dataclasses.replace(recipe, name="other"),
        "mxfp8",
    ):
        assert recipe != other
    assert mixed != dataclasses.replace(mixed, wgrad=recipe) and estimate != dataclasses.replace(estimate, p=1)


def test_compiled_code_compares_recipes_whose_numbers_have_changed():
    graphs = []

    def keep(graph, inputs):
        graphs.append(len(inputs))
        return graph

    torch._dynamo.reset()
    differ = torch.compile(lambda x, one, other: x + (one != other), backend=keep, fullgraph=True)
    pairs = [("mxfp8", "mxfp8"), ("nvfp4", "nvfp4"), ("bf16", "bf16"), ("mxfp8", "mxfp8"), ("nvfp4", "mxfp8")]
    results = [differ(torch.zeros(()), RECIPES[one], dataclasses.replace(RECIPES[other])) for one, other in pairs]
    assert results == [0, 0, 0, 0, 1] and graphs == [1] * 4
