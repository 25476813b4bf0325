import math
from pathlib import Path

import matplotlib.colors
import matplotlib.image
import numpy as np
import pytest

from mxtrain.analysis import Run, plot
from mxtrain.analysis.plots import COLORS, moving_average


def make_run(name, losses, validation=()):
    return Run(
        name=name,
        folder=Path("runs") / name,
        facts={"converter": "mxnorm", "recipe": "mxfp8", "p": 2, "estimator": "pre_round"},
        training=[{"step": step, "loss": loss} for step, loss in enumerate(losses, start=1)],
        validation=[{"step": step, "validation_loss": loss} for step, loss in validation],
    )


def falling(n, end=3.0, seed=0):
    noise = np.random.default_rng(seed).normal(0, 0.15, n)
    return [float(end + (10 - end) * math.exp(-4 * i / n) + noise[i]) for i in range(n)]


def runs_drawn(path):
    """Which runs' colours occur in the picture, by the run's index."""
    pixels = (matplotlib.image.imread(path)[..., :3] * 255).round().astype(int).reshape(-1, 3)
    present = set(map(tuple, np.unique(pixels, axis=0)))
    colors = [tuple((np.array(matplotlib.colors.to_rgb(color)) * 255).round().astype(int)) for color in COLORS]
    return {i for i, color in enumerate(colors) if color in present}


@pytest.mark.parametrize("count", [1, 2, 8])
def test_draws_one_line_per_run(tmp_path, count):
    runs = [make_run(f"run-{i}", falling(200, end=2 + i / 4, seed=i), [(100, 5.0), (200, 3.0)]) for i in range(count)]
    path = plot(runs, tmp_path / "pictures" / "loss.png")
    assert path == tmp_path / "pictures" / "loss.png"
    assert runs_drawn(path) == set(range(count))


@pytest.mark.parametrize("losses", [[9.0], [9.0, math.nan, 8.0, 7.5], [9.0, math.inf]], ids=["one", "nan", "inf"])
def test_draws_short_and_broken_runs(tmp_path, losses):
    assert runs_drawn(plot([make_run("a", losses)], tmp_path / "loss.png")) == {0}


def test_draws_when_nothing_is_finite(tmp_path):
    assert plot([make_run("a", [math.nan] * 60)], tmp_path / "loss.png").stat().st_size > 0


def test_moving_average():
    line = np.arange(20.0)
    smooth = moving_average(line, half_width=3)
    np.testing.assert_allclose(smooth[:17], line[:17])  # symmetric windows keep a straight line, from the first point
    np.testing.assert_allclose(smooth[-1], np.mean(line[-4:]))
    np.testing.assert_allclose(moving_average(line, half_width=0), line)


def test_moving_average_skips_nan():
    values = np.array([1.0, 1.0, np.nan, 1.0, 1.0, 1.0])
    np.testing.assert_array_equal(moving_average(values, half_width=1), values)
