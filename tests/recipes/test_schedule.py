"""Entries of a schedule: their steps, what they change, and mistakes that show without a model; and the guard."""

import math

import pytest

from mxtrain.errors import ConfigError
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import GEMMS, RECIPES
from mxtrain.recipes.schedule import LayerState, RecipeChange, SpikeGuard, Timeline, parse_entries

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
        ({"from_step": 1, "until_step": 2, "until_share": 0.1, **BF16_FORWARD}, "mxnorm.schedule[0] has both of until"),
        ({"from_step": 1001, **BF16_FORWARD}, "mxnorm.schedule[0].from_step = 1001 is not a step of this run: allowed"),
        ({"from_step": 0, **BF16_FORWARD}, "mxnorm.schedule[0].from_step = 0 is not a step of this run"),
        ({"from_step": 9, "until_step": 1001, **BF16_FORWARD}, "mxnorm.schedule[0].until_step = 1001 is not a step of"),
        ({"from_step": 9, "until_step": 8, **BF16_FORWARD}, "mxnorm.schedule[0].until_step = 8 ends the entry before "),
        ({"from_share": 1.5, **BF16_FORWARD}, "mxnorm.schedule[0].from_share = 1.5 is not a share of the run: allowed"),
        ({"from_share": -0.1, **BF16_FORWARD}, "mxnorm.schedule[0].from_share = -0.1 is not a share of the run"),
        ({"from_share": 1, **BF16_FORWARD}, "mxnorm.schedule[0].from_share = 1 is past the last step, 1000"),
        ({"from_share": 0.5, "until_share": 0.5, **BF16_FORWARD}, "mxnorm.schedule[0].until_share = 0.5 ends the entr"),
        ({"from_step": 1, "modules": [], **BF16_FORWARD}, "mxnorm.schedule[0].modules = [] names no module"),
        ({"from_step": 1}, "mxnorm.schedule[0] changes nothing: set one of: recipe, p, estimator, norm"),
        ({"from_step": 1, "norm": "rmsnorm", "p": 1}, "mxnorm.schedule[0].p = 1 has no meaning beside norm"),
        ({"from_step": 1, "recipe": "fp4"}, "mxnorm.schedule[0].recipe = 'fp4' is not one of: 'mxfp8'"),
        ({"from_step": 1, "recipe": "fprop=bf16, fprop=mxfp8"}, "mxnorm.schedule[0].recipe = 'fprop=bf16, fprop=mxfp8"),
        ({"from_step": 1, "recipe": "forward=bf16"}, "mxnorm.schedule[0].recipe = 'forward=bf16': GEMM = 'forward' is"),
    ],
)  # fmt: skip
def test_mistakes(table, message):
    with pytest.raises(ConfigError) as error:
        parsed(table)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


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
        ({"recipe": "fprop=nvfp4, wgrad=mxfp8", "p": 1, "estimator": "exact"}, "fprop=nvfp4, wgrad=mxfp8, p=1, exact"),
        ({"norm": "rmsnorm"}, "rmsnorm"),
    ],
)
def test_changes_in_words(keys, words):
    (entry,) = parsed({"from_step": 1000, "modules": ["layers.0", "w2"], **keys})
    assert str(entry.change) == words and str(entry) == f"step 1000: {words} in layers.0, w2"


def test_a_timeline_gives_the_state_of_a_step():
    one, two = LayerState(RECIPES["mxfp8"]), LayerState(RECIPES["nvfp4"])
    timeline = Timeline({1: one, 4: two, 6: one}, {1: two, 4: two, 6: two})
    assert [timeline.at(step) for step in range(1, 8)] == [one, one, one, two, two, one, one]
    assert timeline.at(1, falls_back=True) == two
    assert timeline.all_states == (one, two)


QUIET = [4.0, 3.8, 4.0, 3.8]  # mean 3.9, standard deviation 0.1


def guard_after(losses, window=4, sigmas=3.0, steps=5):
    guard = SpikeGuard(window, sigmas, steps)
    for step, loss in enumerate(losses, start=1):
        guard.observe(step, loss)
    return guard


def fallback(guard, until=40):
    return [step for step in range(1, until) if guard.falls_back(step)]


def test_a_loss_far_above_the_losses_before_it_is_a_spike():
    guard = guard_after([*QUIET, 4.21])
    assert fallback(guard) == [7, 8, 9, 10, 11]  # two steps later, for five steps
    assert guard.reason == "the loss of step 5 is 4.2100, above 3.9000 + 3 x 0.1000"
    assert fallback(guard_after([*QUIET, 4.19])) == []
    assert fallback(guard_after([*QUIET, 1.0])) == []  # far below


def test_a_spike_needs_a_full_window():
    assert fallback(guard_after([4.0, 3.8, 4.0, 9.0])) == []


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_loss_that_is_not_finite_is_a_spike_at_any_time(loss):
    guard = guard_after([4.0, loss])
    assert fallback(guard, until=10) == [4, 5, 6, 7, 8] and str(loss) in guard.reason


def test_from_a_spike_to_the_end_of_the_fallback_nothing_is_a_spike():
    guard = guard_after([*QUIET, 9.0, 50.0, math.nan, 4.0, 3.8, 4.0, 3.8])
    assert fallback(guard) == [7, 8, 9, 10, 11]
    guard.observe(12, 9.0)  # the losses of steps 8 to 11 have filled the window
    assert fallback(guard) == [14, 15, 16, 17, 18]


def test_a_loss_of_the_last_step_of_the_fallback_is_no_spike():
    guard = guard_after([*QUIET, 9.0, 4.0, 4.0, 4.0, 4.0, 4.0, math.nan])  # of steps 7 to 11
    assert fallback(guard) == [7, 8, 9, 10, 11]


def test_a_spike_empties_the_window():
    guard = guard_after([*QUIET, 9.0, 4.0, 3.8, 4.0], steps=1)
    guard.observe(9, 9.0)  # three losses since the spike
    assert fallback(guard) == [7]


def test_a_resumed_guard_goes_on_as_it_was():
    losses = [*QUIET, 9.0, 4.0, 3.8, 4.0, 3.8, 3.9, 4.0, 9.0]
    whole = guard_after(losses)
    for saved in range(len(losses)):
        resumed = guard_after(QUIET)  # which are forgotten
        state = guard_after(losses[:saved]).state_dict()
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        for step in range(saved + 1, len(losses) + 1):
            resumed.observe(step, losses[step - 1])
        assert resumed.state_dict() == whole.state_dict()
