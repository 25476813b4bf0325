import math
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from mxtrain.analysis import Run, plot, plots
from mxtrain.analysis.plots import COLORS, curves, line_style, minus, moving_average
from mxtrain.errors import ConfigError

LONG = 50
"""Points of the shortest curve that is smoothed"""


def make_run(name, losses, validation=(), folder="runs", converter="mxnorm", p=2):
    return Run(
        name=name,
        folder=Path(folder) / name,
        facts={"converter": converter, "recipe": "mxfp8", "p": p, "estimator": "pre_round"} if converter else {},
        training=[
            {"step": 10 * step, "loss": loss, "tokens_seen": 640 * step, "time": 1e9 + 36 * step}
            for step, loss in enumerate(losses, start=1)
        ],
        validation=[{"step": step, "validation_loss": loss} for step, loss in validation],
    )


def test_a_matplotlib_that_cannot_start_is_one_line(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match="^Matplotlib cannot start: ModuleNotFoundError: [^\n]*$"):
        plot([make_run("a", [3.0])], tmp_path / "a.png")


def falling(n, end=3.0, seed=0):
    noise = np.random.default_rng(seed).normal(0, 0.15, n)
    return [float(end + (10 - end) * math.exp(-4 * i / n) + noise[i]) for i in range(n)]


def runs_drawn(path):
    """The indices of the runs whose colors occur in the picture."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    present = set(np.unique(pixels))
    colors = [int(color[1:], 16) for color in COLORS[:5]]
    return {i for i, color in enumerate(colors) if color in present}


@pytest.fixture
def axes_of(monkeypatch):
    """``axes_of(runs, **options)``: the axes that ``plot`` fills, without the time to draw them."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    monkeypatch.setattr(plots, "replace_file", lambda path, content: None)

    def axes_of(runs, **options):
        plot(runs, Path("loss.png"), **options)
        panels = figures[-1].axes
        return panels[0] if len(panels) == 1 else panels

    return axes_of


def legend(axes):
    return [text.get_text() for text in axes.figure.legends[0].get_texts()]


def test_short_and_broken_runs_are_drawn(tmp_path):
    losses = ([9.0], [9.0, math.nan, 8.0, 7.5], [9.0, math.inf], [8.0, *[math.nan] * LONG], falling(200))
    runs = [make_run(f"run-{i}", values, [(1000, 5.0)]) for i, values in enumerate(losses)]
    path = plot(runs, tmp_path / "pictures" / "loss.png")
    assert path == tmp_path / "pictures" / "loss.png" and runs_drawn(path) == set(range(len(losses)))
    nothing = [make_run("a", [math.nan] * 60)]
    assert plot(nothing, tmp_path / "nan.svg").read_text().count("loss (nats per token)</text>") == 1
    assert plot(nothing, tmp_path / "nan.PDF").read_bytes().startswith(b"%PDF")
    with pytest.raises(ConfigError, match="'nan.gif' is not a PNG, SVG or PDF"):
        plot(nothing, "nan.gif")


def test_many_lines_look_different():
    assert len({tuple(line_style(index).values()) for index in range(32)}) == 32


def test_a_run_is_a_line_and_its_validations_are_diamonds(axes_of):
    losses = falling(LONG - 1)
    axes = axes_of([make_run("a", losses, [(100, 5.0), (200, 3.0)])])
    assert axes.get_title() == "Training loss; diamonds: validation" and legend(axes) == ["a (mxnorm mxfp8 p=2)"]
    line, diamonds = axes.get_lines()
    np.testing.assert_array_equal(line.get_xydata(), [(10 * i, loss) for i, loss in enumerate(losses, start=1)])
    np.testing.assert_array_equal(diamonds.get_xydata(), [(100, 5.0), (200, 3.0)])
    assert diamonds.get_color() == line.get_color()


def test_changes_of_one_step_have_one_label(axes_of):
    run = make_run("a", [9.0, 8.0, 7.0])
    run.events.extend({"step": step, "event": text} for step, text in ((10, "$one"), (20, "two"), (20, "word " * 20)))
    run.events.append({"step": 40, "event": "after the last logged step"})
    texts = {text.get_text(): text.get_position()[0] for text in axes_of([run], x="tokens").texts}
    assert texts == {
        r"\$one": 640,
        "two\nword word word word word\nword word word word ...": 1280,
        "after the last logged\nstep": 1920,
    }


def test_several_runs_are_named_in_the_legend(axes_of):
    runs = [
        make_run("a", [9.0, 8.0]),
        make_run("b", [9.0, math.nan, math.inf], folder="x"),
        make_run("b", [9.0], folder="y", converter=None),
    ]
    axes = axes_of(runs)
    assert legend(axes) == ["a (mxnorm mxfp8 p=2)", "x/b (mxnorm mxfp8 p=2) (not finite at step 20)", "y/b"]


def test_names_are_drawn_as_they_are_written(axes_of):
    """Matplotlib reads $...$ as math, and hides labels that begin with an underscore."""
    runs = [make_run(name, [9.0, 8.0], converter=None) for name in ("_a", "lr$x^$", "$")]
    axes = axes_of(runs)
    axes.figure.draw_without_rendering()  # raises for broken math
    assert [text.replace(r"\$", "$") for text in legend(axes)] == [" _a", "lr$x^$", "$"]
    label = axes_of(runs[1:], differences=True)[1].yaxis.label
    label.figure.draw_without_rendering()
    assert label.get_text() == "loss minus that of\nlr\\$x^\\$"


def test_a_long_run_gets_a_moving_average(axes_of):
    losses = falling(LONG)
    points, average, _ = axes_of([make_run("a", losses)]).get_lines()
    np.testing.assert_array_equal(points.get_ydata(), losses)
    np.testing.assert_array_equal(average.get_ydata(), moving_average(pd.Series(losses), 3))
    assert points.get_alpha() < 1 and points.axes.get_title().endswith("\nstrong: mean of 3 logged steps")


def test_the_number_of_points_in_a_mean_is_the_users_and_is_stated(axes_of):
    losses = falling(LONG)
    runs = [make_run("a", losses), make_run("b", falling(3 * LONG))]
    axes = axes_of(runs, smooth=10)
    np.testing.assert_array_equal(axes.get_lines()[1].get_ydata(), moving_average(pd.Series(losses), 11))
    assert axes.get_title().endswith("mean of 11 logged steps")
    assert axes_of(runs).get_title().endswith("mean of 7 logged steps"), "of the longest curve"
    axes = axes_of(runs, smooth=1)
    assert len(axes.get_lines()) == 4 and "mean" not in axes.get_title()


def test_differences_to_a_baseline(axes_of):
    base = make_run("base", [9.0, 8.0, 7.0, 6.0], [(20, 8.5), (40, 6.5)])
    runs = [base, make_run("a", [9.5, 8.25, 7.0], [(20, 8.0)], p=1), make_run("b", [5.0, math.nan, 7.5, 6.5, 1.0])]
    _, panel = axes_of(runs, differences=True)
    a, a_validation, b, _, _ = panel.get_lines()
    np.testing.assert_array_equal(a.get_ydata(), [0.5, 0.25, 0.0])
    np.testing.assert_array_equal(a_validation.get_xydata(), [(20, -0.5)])
    np.testing.assert_array_equal(b.get_ydata(), [-4.0, math.nan, 0.5, 0.5, math.nan])  # the baseline ends before it
    assert panel.get_ylabel() == "loss minus that of\nbase"
    assert [line.get_color() for line in (a, b)] == [*COLORS[1:3]]


@pytest.mark.parametrize(
    ("x", "values", "validation", "label"),
    [
        ("step", [10, 20, 30], 25, "step"),
        ("tokens", [640, 1280, 1920], 1600, "tokens seen"),
        ("time", [0, 0.01, 0.02], 0.015, "hours since the first logged step"),
    ],
)
def test_the_x_axis(axes_of, x, values, validation, label):
    axes = axes_of([make_run("a", [9.0, 8.0, 7.0], [(25, 7.5)])], x=x)
    line, diamonds = axes.get_lines()
    assert list(line.get_xdata()) == values and list(diamonds.get_xdata()) == [validation]
    assert axes.get_xlabel() == label


def test_moving_average():
    line = pd.Series(np.arange(20.0))
    smooth = moving_average(line, 7)
    np.testing.assert_allclose(smooth[:17], line[:17])  # symmetric windows keep a straight line, from the first point
    np.testing.assert_allclose(smooth[19], np.mean(line[-4:]))
    np.testing.assert_allclose(moving_average(line, 1), line)
    np.testing.assert_allclose(moving_average(line[:3], 7), [0, 1, 1])  # as does a line shorter than the window


def test_moving_average_skips_values_that_are_not_finite():
    values = pd.Series([1.0, 1.0, np.nan, 1.0, np.inf, 1.0, 1.0])
    np.testing.assert_array_equal(moving_average(values, 3), values.where(np.isfinite(values)))


def test_a_difference_of_curves_with_other_steps_is_interpolated():
    assert minus(pd.Series([20.0], [15]), pd.Series([10.0, 20.0], [10, 20])).tolist() == [5.0]
    assert np.isnan(minus(pd.Series([1.0], [20]), pd.Series([1.0], [10]))).all()
    assert np.isnan(minus(pd.Series([1.0], [20]), pd.Series([], dtype=float))).all()


def test_an_x_axis_that_is_not_logged_is_an_error():
    run = Run("a", Path("a"), {}, [{"step": 1, "loss": 9.0}], [])
    with pytest.raises(ConfigError, match="a: metrics.jsonl has no 'tokens_seen' in some rows, which --x tokens needs"):
        curves(run, "tokens")
