"""The guard's rule on made-up losses."""

import math

import pytest

from mxtrain.recipes.spike_guard import SpikeGuard

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
