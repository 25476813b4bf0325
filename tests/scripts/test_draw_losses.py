import importlib
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

EVIDENCE = Path(__file__).parents[2] / "scripts" / "evidence"
sys.path.insert(0, str(EVIDENCE))
draw_losses = importlib.import_module("draw_losses")


def test_runs_are_read_by_variant_and_seed_and_repetitions_are_left_out():
    curves = draw_losses.read(EVIDENCE / "llama3_1b" / "losses.csv", "loss")
    assert {name: list(seeds) for name, seeds in curves.items()} == {
        "bf16": ["0", "1"], "mx_linear": ["0"], "exact": ["0"], "p2": ["0", "1"],
    }  # fmt: skip
    assert curves["bf16"]["0"].x[:3].tolist() == [1, 10, 20] and curves["bf16"]["0"].loss[0] == 10.8748
    assert list(draw_losses.read(EVIDENCE / "norm_gradients" / "losses.csv", "grad_norm")["radial"]) == ["0", "1"]


def test_the_picture_has_differences_and_every_gradient_norm(monkeypatch):
    drawn = []
    monkeypatch.setattr(draw_losses, "save_picture", lambda figure, path: drawn.append((figure, path)))
    draw_losses.draw(EVIDENCE / "rms_ablations", "exact", gradient_norms=True)
    [(figure, path)] = drawn
    assert isinstance(figure, Figure) and path == EVIDENCE / "rms_ablations" / "losses.png"
    panels = {axes.get_title(): axes for axes in figure.axes if axes.get_visible()}
    assert list(panels) == ["exact", "p = 2", "damped", "amplified", "evenly damped", ""]
    assert [len(axes.lines) for axes in panels.values()] == [2, 3, 3, 3, 3, 6]
    first, *_, last = panels["exact"].lines[-1].get_ydata()
    assert first == pytest.approx(10.8683) and np.isfinite(last)
