import math
from pathlib import Path

import numpy as np
import pytest

from mxtrain.analysis import Run
from mxtrain.analysis.curves import SMOOTH_FROM, curve, events, moving_average, notes, window
from mxtrain.errors import ConfigError


def make_run(losses, first=1, **extra):
    rows = [{"step": step, "loss": loss, **extra} for step, loss in enumerate(losses, start=first)]
    return Run("a", Path("a"), {}, rows, [])


def test_moving_average():
    line = np.arange(20.0)
    smooth = moving_average(line, half_width=3)
    np.testing.assert_allclose(smooth[:17], line[:17])  # symmetric windows keep a straight line, from the first point
    np.testing.assert_allclose(smooth[-1], np.mean(line[-4:]))
    np.testing.assert_allclose(moving_average(line, half_width=0), line)


def test_moving_average_skips_values_that_are_not_finite():
    values = np.array([1.0, 1.0, np.nan, 1.0, np.inf, 1.0, 1.0])
    expected = np.where(np.isfinite(values), 1.0, np.nan)
    np.testing.assert_array_equal(moving_average(values, half_width=1), expected)


def test_a_difference_is_taken_where_both_curves_are():
    base = curve(make_run([9.0, math.inf, 7.0, 6.0]))
    difference = curve(make_run([8.0, 8.0, 8.0, 8.0, 8.0], first=0)).minus(base)
    np.testing.assert_array_equal(difference.loss, [math.nan, -1.0, math.nan, 1.0, 2.0])
    assert len(difference.validation_loss) == 0


def test_a_difference_of_curves_with_other_steps_is_interpolated():
    rows = [{"step": step, "loss": float(step)} for step in (10, 20)]
    base = curve(Run("b", Path("b"), {}, rows, [{"step": 10, "validation_loss": 1.0}]))
    other = curve(Run("c", Path("c"), {}, [{"step": 15, "loss": 20.0}], [{"step": 20, "validation_loss": 1.0}]))
    difference = other.minus(base)
    assert list(difference.loss) == [5.0] and np.isnan(difference.validation_loss).all()


@pytest.mark.parametrize(("points", "width"), [(None, 1), (1, 1), (2, 3), (3, 3), (10, 11)])
def test_windows_are_odd(points, width):
    assert window(curve(make_run([9.0] * (SMOOTH_FROM - 1))), points) == width


def test_a_long_curve_has_a_window_of_about_four_percent():
    assert window(curve(make_run([9.0] * 1000)), None) == 41


@pytest.mark.parametrize(("x", "key"), [("tokens", "tokens_seen"), ("time", "time")])
def test_an_x_axis_that_is_not_logged_is_an_error(x, key):
    with pytest.raises(ConfigError, match=f"a: metrics.jsonl has no '{key}' in some rows, which --x {x} needs"):
        curve(make_run([9.0]), x)


def test_what_a_reader_should_know():
    runs = [make_run([9.0, math.nan, math.inf, 7.0]), make_run([9.0, 8.0, 7.0, 6.0]), make_run([9.0])]
    assert notes(runs, ["a", "b", "c"]) == [
        "a: 2 of 4 losses are not finite, the first at step 2",
        "c: ends at step 1; the longest run ends at step 4",
    ]


def test_what_comes_after_the_last_logged_step_has_a_place_of_its_own():
    rows = [{"step": step, "loss": 1.0, "tokens_seen": 100.0 * step, "time": 5.0 * step} for step in (1, 10)]
    validation = [{"step": step, "validation_loss": 1.0} for step in (8, 12, 16)]
    run = Run("a", Path("a"), {}, rows, validation, events=[{"step": 11, "event": "x"}])
    for x, places in (("step", [8, 12, 16]), ("tokens", [800, 1200, 1600]), ("time", [35, 55, 75])):
        np.testing.assert_allclose(curve(run, x).validation_x, places)
    assert events(run, "tokens") == [(1100.0, "x")]


def test_a_clock_that_is_set_back_takes_no_time():
    rows = [{"step": step, "loss": 1.0, "time": time} for step, time in enumerate((100.0, 200.0, 50.0, 150.0), start=1)]
    assert list(curve(Run("a", Path("a"), {}, rows, []), "time").x) == [0.0, 100.0, 100.0, 200.0]
