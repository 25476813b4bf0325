import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from mxtrain.analysis.comparison import compare, read_results

EVIDENCE = Path(__file__).parents[2] / "scripts" / "evidence"
sys.path.insert(0, str(EVIDENCE))
draw_losses, draw_rates = importlib.import_module("draw_losses"), importlib.import_module("draw_rates")


def test_runs_are_read_by_variant_and_seed_and_repetitions_are_left_out():
    rows = draw_losses.read(EVIDENCE / "llama3_1b" / "losses.csv")
    runs = {name: own.seed.unique().tolist() for name, own in rows.groupby("variant")}
    assert runs == {"bf16": [0, 1], "mx_linear": [0], "exact": [0], "p2": [0, 1]}
    first = rows[(rows.variant == "bf16") & (rows.seed == 0)]
    assert first.step[:3].tolist() == [1, 10, 20] and first.loss.iloc[0] == 10.8748
    rows = draw_losses.read(EVIDENCE / "norm_gradients" / "losses.csv")
    assert rows[rows.variant == "radial"].seed.unique().tolist() == [0, 1]


def test_the_picture_has_differences_and_every_gradient_norm(monkeypatch):
    drawn = []
    monkeypatch.setattr(draw_losses, "save_picture", lambda figure, path: drawn.append((figure, path)))
    draw_losses.draw(EVIDENCE / "rms_ablations", "exact", gradient_norms=True)
    [(figure, path)] = drawn
    assert isinstance(figure, Figure) and path == EVIDENCE / "rms_ablations" / "losses.png"
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_visible()}
    others = ["p = 2", "damped", "amplified", "evenly damped"]
    assert list(panels) == ["loss of exact", *(f"{name} minus exact" for name in others), ""]
    assert [len(axes.lines) for axes in panels.values()][:-1] == [2, 3, 3, 3, 3]
    assert len(panels[""].figure.legends[0].texts) == 6
    first, *_, last = panels["loss of exact"].lines[-1].get_ydata()
    assert first == pytest.approx(10.8683) and np.isfinite(last)


def test_losses_against_rates_have_the_errors_of_the_pairs(monkeypatch):
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))
    (group,) = compare(read_results(EVIDENCE / "qwen3_126m.csv"))
    draw_rates.rates_svg(group)
    upper, lower = figures[0].axes
    base, p2, *_ = [line.get_ydata() for line in upper.lines if len(line.get_ydata())]
    np.testing.assert_allclose(p2 - base, [0.0246, 0.0050], atol=1e-4)
    at_first_rate = [line.get_xdata()[0] for line in upper.lines[:2]]
    assert at_first_rate[0] < at_first_rate[1] < 1e-3, "no marker hides another"
    ends = np.array([segment[:, 1] for bars in lower.containers for segment in bars.lines[2][0].get_segments()])
    found = [one for one in group.cells.validation_difference if one]
    np.testing.assert_allclose(sorted(ends[:, 1] - ends[:, 0]), sorted(2 * one.error for one in found), rtol=1e-6)
