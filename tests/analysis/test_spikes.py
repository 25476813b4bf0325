import math

from mxtrain.analysis.spikes import WINDOW, spikes

NOISE = [0.01, -0.01, 0.02, -0.02, 0.0]  # median absolute deviation 0.01, so six deviations are 0.089


def losses(count):
    return [3.0 + NOISE[i % 5] for i in range(count)]


def test_noise_a_falling_loss_and_a_step_down_are_no_spikes():
    assert spikes(losses(200)) == []
    assert spikes([8.0 * 0.98**i for i in range(200)]) == []
    assert spikes(losses(40) + [1.0] * 40) == []


def test_a_spike_is_higher_than_both_limits_and_neighbours_are_one():
    run = losses(60)
    run[30], run[40], run[41], run[50] = 3.08, 3.2, 4.0, 3.3
    assert spikes(run) == [40, 50]
    wide = [3.0 + 10 * NOISE[i % 5] for i in range(60)]  # six deviations are 0.89
    wide[40], wide[50] = 3.8, 4.0
    assert spikes(wide) == [50]


def test_the_limits_are_not_added():
    run = losses(60)
    run[40] = 3.15  # above 0.1, and above six deviations, but not above their sum
    assert spikes(run) == [40]


def test_a_window_holds_exactly_as_many_losses_as_the_rule_says():
    """The oldest loss of the window decides: with it, half of the losses are high, and the deviation is wide."""
    assert spikes([3.0] * 10 + [2.8] * 10 + [2.95]) == []
    assert spikes([3.0] * 9 + [2.8] * 11 + [2.95]) == [WINDOW]


def test_the_first_losses_and_those_that_are_not_finite_begin_no_spike():
    run = losses(60)
    run[WINDOW - 1], run[30], run[31], run[40] = 9.0, math.nan, math.inf, 9.0
    assert spikes(run) == [40]
    assert spikes([math.nan] * 60) == []
