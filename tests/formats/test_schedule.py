"""Entries of a schedule: their steps, what they change, and mistakes that show without a model."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import GEMMS, RECIPES
from mxtrain.formats.schedule import LayerState, RecipeChange, Timeline, parse_entries

BF16_FORWARD = {"recipe": "fprop=bf16"}


def parsed(*tables, steps=1000, **switches):
    return parse_entries(tables, steps, switches, "mxnorm.schedule")


@pytest.mark.parametrize(
    ("keys", "steps", "first", "last"),
    [
        ({"from_share": 0.9}, 1000, 901, 1000),  # the last 10 %
        ({"from_share": 0.29}, 100, 30, 100),  # 0.29 * 100 is less than 29 in floating point
        ({"from_share": 0.9}, 15, 14, 15),  # 13.5 steps are not 14
        ({"from_share": 0, "until_share": 0.5}, 7, 1, 3),
        ({"from_step": 9000}, 9000, 9000, 9000),
        ({"from_step": 3, "until_step": 5}, 10, 3, 5),
        ({"from_step": 3, "until_share": 1}, 10, 3, 10),
    ],
)
def test_steps_of_an_entry(keys, steps, first, last):
    (entry,) = parsed({**keys, **BF16_FORWARD}, steps=steps)
    assert (entry.first, entry.last) == (first, last)


def test_shares_that_meet_leave_no_step_out_and_share_none():
    for steps in range(3, 40):
        parts = parsed(
            {"from_share": 0, "until_share": 0.35, **BF16_FORWARD},
            {"from_share": 0.35, "until_share": 0.7, **BF16_FORWARD},
            {"from_share": 0.7, **BF16_FORWARD},
            steps=steps,
        )
        assert [step for e in parts for step in range(e.first, e.last + 1)] == list(range(1, steps + 1))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (BF16_FORWARD, "mxnorm.schedule[0] has neither of from_step and from_share"),
        ({"from_step": 3, "from_share": 0.1, **BF16_FORWARD}, "mxnorm.schedule[0] has both of from_step and from_shar"),
        ({"from_step": 1001, **BF16_FORWARD}, "mxnorm.schedule[0].from_step = 1001 is not a step of this run; allowed"),
        ({"from_step": 9, "until_step": 8, **BF16_FORWARD}, "mxnorm.schedule[0].until_step = 8 is before"),
        ({"from_share": 1.5, **BF16_FORWARD}, "mxnorm.schedule[0].from_share = 1.5 is not a share of the run; allowed"),
        ({"from_share": 1, **BF16_FORWARD}, "mxnorm.schedule[0].from_share = 1 is after the last step, 1000"),
        ({"from_share": 0.5, "until_share": 0.5, **BF16_FORWARD}, "mxnorm.schedule[0].until_share = 0.5 is before the"),
        ({"from_step": 1, "modules": [], **BF16_FORWARD}, "mxnorm.schedule[0].modules = [] names no module"),
        ({"from_step": 1}, "mxnorm.schedule[0] changes nothing; set recipe or norm"),
        ({"from_step": 1, "norm": "rmsnorm", **BF16_FORWARD}, "mxnorm.schedule[0].recipe = 'fprop=bf16' has no effect"),
        ({"from_step": 1, "recipe": "fp4"}, "mxnorm.schedule[0].recipe = 'fp4' is not one of: 'mxfp8'"),
    ],
)  # fmt: skip
def test_mistakes(table, message):
    with pytest.raises(ConfigError) as error:
        parsed(table)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_a_dequantized_backward_takes_no_recipe_for_its_gemms_alone():
    table = {"from_step": 1, "recipe": "dgrad=mxfp8"}
    with pytest.raises(ConfigError, match="'dgrad=mxfp8' has no effect with backward = 'dequantized'"):
        parsed(table, backward="dequantized")
    for recipe in ("mxfp8", "dgrad=bf16", "fprop=mxfp8, dgrad=mxfp8"):
        parsed({**table, "recipe": recipe}, backward="dequantized")


def test_a_change_keeps_the_gemms_that_it_does_not_name():
    base = get_recipe("nvfp4")
    changed = RecipeChange.parse("entry", BF16_FORWARD, {}).of_recipe(base)
    assert changed.name == "fprop=bf16, dgrad=nvfp4, wgrad=nvfp4"
    assert (changed.dgrad, changed.wgrad) == (base.dgrad, base.wgrad) and changed.fprop.format is None


@pytest.mark.parametrize(("base", "blocks"), [("nvfp4", 16), ("mxfp8", 32)])
def test_high_precision_keeps_the_blocks_of_the_estimate(base, blocks):
    for spec in ("fprop=bf16", "bf16"):
        changed = RecipeChange.parse("entry", {"recipe": spec}, {}).of_recipe(get_recipe(base))
        assert changed.fprop.block_size == blocks
    assert changed.name == "bf16" and changed.fprop == changed.dgrad == changed.wgrad


def test_settings_of_the_run_hold_for_the_recipes_of_entries():
    (entry,) = parsed({"from_step": 1, "recipe": "nvfp4"}, hadamard=False, scale_rounding="floor")
    assert [entry.change.gemms[gemm].hadamard for gemm in GEMMS] == [False] * 3
    assert RECIPES["nvfp4"].hadamard


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        (BF16_FORWARD, "fprop=bf16"),
        ({"recipe": "nvfp4"}, "nvfp4"),
        ({"recipe": "fprop=nvfp4, wgrad=mxfp8"}, "fprop=nvfp4, wgrad=mxfp8"),
        ({"norm": "rmsnorm"}, "rmsnorm"),
    ],
)
def test_changes_in_words(keys, words):
    (entry,) = parsed({"from_step": 1000, "modules": ["layers.0", "w2"], **keys})
    assert str(entry.change) == words and str(entry) == f"step 1000: {words} in layers.0, w2"


def test_a_timeline_gives_the_state_of_a_step():
    one, two = LayerState(RECIPES["mxfp8"]), LayerState(RECIPES["nvfp4"])
    timeline = Timeline({1: one, 4: two, 6: one})
    assert [timeline.at(step) for step in range(1, 8)] == [one, one, one, two, two, one, one]
    assert timeline.all_states == (one, two)
