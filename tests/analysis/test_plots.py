import math
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from mxtrain.analysis import Run, plot, plots
from mxtrain.analysis.plots import COLORS, SMOOTH_FROM, moving_average


def make_run(name, losses, validation=(), folder="runs", converter="mxnorm"):
    return Run(
        name=name,
        folder=Path(folder) / name,
        facts={"converter": converter, "recipe": "mxfp8", "p": 2, "estimator": "pre_round"} if converter else {},
        training=[{"step": 10 * step, "loss": loss} for step, loss in enumerate(losses, start=1)],
        validation=[{"step": step, "validation_loss": loss} for step, loss in validation],
    )


def falling(n, end=3.0, seed=0):
    noise = np.random.default_rng(seed).normal(0, 0.15, n)
    return [float(end + (10 - end) * math.exp(-4 * i / n) + noise[i]) for i in range(n)]


def runs_drawn(path):
    """The indices of the runs whose colors occur in the picture."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int) @ (1 << 16, 1 << 8, 1)
    present = set(np.unique(pixels))
    colors = [int(matplotlib.colors.to_hex(color)[1:], 16) for color in COLORS]
    return {i for i, color in enumerate(colors) if color in present}


@pytest.fixture
def axes_of(monkeypatch):
    """``axes_of(runs)``: the axes that ``plot`` fills, without the time to draw them."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    monkeypatch.setattr(plots, "replace_file", lambda path, content: None)

    def axes_of(runs, folder="."):
        plot(runs, Path(folder) / "loss.png")
        [axes] = figures.pop().axes
        return axes

    return axes_of


def legend(axes):
    return [text.get_text() for text in axes.get_legend().get_texts()]


def test_every_run_has_a_color_in_the_picture(tmp_path):
    count = len(COLORS)
    runs = [make_run(f"run-{i}", falling(200, end=2 + i / 4, seed=i), [(1000, 5.0)]) for i in range(count)]
    path = plot(runs, tmp_path / "pictures" / "loss.png")
    assert path == tmp_path / "pictures" / "loss.png"
    assert runs_drawn(path) == set(range(count))


def test_short_and_broken_runs_are_drawn(tmp_path):
    losses = ([9.0], [9.0, math.nan, 8.0, 7.5], [9.0, math.inf], [8.0, *[math.nan] * SMOOTH_FROM])
    runs = [make_run(f"run-{i}", values) for i, values in enumerate(losses)]
    assert runs_drawn(plot(runs, tmp_path / "loss.png")) == set(range(len(losses)))
    assert plot([make_run("a", [math.nan] * 60)], tmp_path / "nan.png").stat().st_size > 0


def test_one_run_is_named_in_the_title(axes_of):
    losses = falling(SMOOTH_FROM - 1)
    axes = axes_of([make_run("a", losses, [(100, 5.0), (200, 3.0)])])
    assert axes.get_title() == "a (mxnorm mxfp8 p=2)" and legend(axes) == ["training", "validation"]
    line, diamonds, _ = axes.get_lines()
    np.testing.assert_array_equal(line.get_xydata(), [(10 * i, loss) for i, loss in enumerate(losses, start=1)])
    np.testing.assert_array_equal(diamonds.get_xydata(), [(100, 5.0), (200, 3.0)])
    assert diamonds.get_color() == line.get_color()


def test_several_runs_are_named_in_the_legend(axes_of):
    runs = [
        make_run("a", [9.0, 8.0]),
        make_run("b", [9.0, math.nan, math.inf], folder="x"),
        make_run("b", [9.0], folder="y", converter=None),
    ]
    axes = axes_of(runs)
    assert axes.get_title() == "Training loss"
    assert legend(axes) == ["a (mxnorm mxfp8 p=2)", "x/b (mxnorm mxfp8 p=2) (not finite at step 20)", "y/b"]


def test_a_long_run_gets_a_moving_average(axes_of):
    losses = falling(SMOOTH_FROM)
    points, average = axes_of([make_run("a", losses)]).get_lines()
    np.testing.assert_array_equal(points.get_ydata(), losses)
    np.testing.assert_array_equal(average.get_ydata(), moving_average(np.array(losses), half_width=1))
    assert points.get_alpha() < 1 and average.get_label() == "training"


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
