import numpy as np
import pytest
from matplotlib.figure import Figure

from mxtrain.analysis import load_run, report_figures
from mxtrain.analysis.comparison import compare
from mxtrain.analysis.plots import Curve
from mxtrain.analysis.report import losses_table
from mxtrain.analysis.results import Result, result_of
from tests.support.paired_runs import make_run


def row(variant, seed, validation, lr=1e-3):
    return Result(f"{variant}{seed}", variant, lr, seed, 10, 2.0, "tiny", validation=validation)


@pytest.fixture
def axes_of(monkeypatch):
    """``axes_of(draw, group)``: the axes of a figure, which is laid out but not painted."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))

    def axes_of(draw, group):
        draw(group)
        return figures[-1].axes

    return axes_of


def marked(axes, marker):
    return [tuple(line.get_xdata()) for line in axes.lines if line.get_marker() == marker]


BASE = [row("base", seed, 2.0 + 0.5 * seed) for seed in range(3)]


def test_a_row_has_a_circle_per_seed_and_the_mean_and_interval_of_the_table(axes_of):
    """Differences 0.01, 0.02 and 0.03: mean 0.02, standard error 0.00577, 4.30 of them on either side."""
    (group,) = compare([*BASE, *(row("a", seed, 2.01 + 0.51 * seed) for seed in range(3))])
    (axes, *_) = axes_of(report_figures.differences_svg, group)
    np.testing.assert_allclose(sorted(marked(axes, "o")), [[0.01], [0.02], [0.03]])
    np.testing.assert_allclose(marked(axes, "D"), [[0.02]])
    zero, interval, *_ = axes.lines
    assert set(zero.get_xdata()) == {0}
    np.testing.assert_allclose(
        interval.get_xdata(), [0.02 - 4.3026527 * 0.01 / 3**0.5, 0.02 + 4.3026527 * 0.01 / 3**0.5]
    )
    numbers = [text.get_text() for text in axes.texts]
    assert numbers == [cells[4] for cells in losses_table(group)[2:]] == ["+0.0200 [-0.0048, +0.0448] (3 pairs)"]
    assert axes.figure.get_suptitle() == "Validation loss minus that of base: tiny, 10 steps"


def test_a_variant_far_from_the_others_is_an_arrow_and_the_rows_are_in_order(axes_of):
    others = [
        row(name, seed, 2.0 + 0.5 * seed + shift)
        for name, shift in (("far", 0.5), ("b", 0.02), ("c", -0.01))
        for seed in (0, 1)
    ]
    (group,) = compare([*BASE, *others])
    (axes, *_) = axes_of(report_figures.differences_svg, group)
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "b", "far"]
    low, high = axes.get_xlim()
    assert -0.02 < low < -0.01 and 0.02 < high < 0.05, "the scale is that of b and c"
    assert marked(axes, ">") == [(high,)] and marked(axes, "<") == []


def test_a_panel_per_learning_rate_and_one_pair_has_no_interval(axes_of):
    rows = [row(name, 0, loss, lr) for lr in (1e-3, 2e-3) for name, loss in (("base", 2.0), ("a", 2.1))]
    (group,) = compare(rows)
    panels = axes_of(report_figures.differences_svg, group)
    assert [axes.get_title(loc="left") for axes in panels] == ["learning rate 0.001", "learning rate 0.002"]
    assert [len(marked(axes, "o")) for axes in panels] == [1, 1] and marked(panels[0], "D") == []
    assert report_figures.differences_svg(compare(rows[:1])[0]) == ""


@pytest.mark.parametrize(
    "extents, reach", [([0.001, 0.02, 0.03, 0.2], 0.03), ([1.0, 2.0], 2.0), ([0.0, 0.0, 1.0], 1.0), ([5.0], 5.0)]
)
def test_a_scale_ends_before_a_jump(extents, reach):
    assert report_figures.scale(reversed(extents)) == reach


def test_losses_against_rates_have_the_errors_of_the_pairs(axes_of):
    """The losses of the seeds differ by 0.5, their differences to the baseline by 0.02. One seed has no pair."""
    rows = [
        row(name, seed, 2.0 + 0.5 * seed + shift * (1 + seed), lr)
        for lr in (1e-3, 4e-3) for seed in (0, 1) for name, shift in (("base", 0.0), ("a", 0.02))
    ]  # fmt: skip
    upper, lower = axes_of(report_figures.rates_svg, compare([*rows, row("a", 2, 9.0)])[0])
    np.testing.assert_allclose([line.get_ydata() for line in upper.lines], [[2.25] * 2, [2.28] * 2])
    (bars,) = lower.containers
    ends = [segment[:, 1] for segment in bars.lines[2][0].get_segments()]
    np.testing.assert_allclose(ends, [[0.02, 0.04]] * 2)
    at_one_rate = [line.get_xdata()[0] for line in upper.lines]
    assert at_one_rate[0] < 1e-3 < at_one_rate[1], "no marker hides another"
    assert report_figures.rates_svg(compare(rows[:4])[0]) == ""


def curve(*losses):
    return Curve(np.arange(1.0, len(losses) + 1), np.array(losses), np.array([]), np.array([]))


def test_curves_are_differences_with_their_mean_and_band_where_all_seeds_are():
    figure = Figure()
    curves = {
        "base": {0: curve(9.0, 8.0, 7.0), 1: curve(9.0, 8.5)},
        "a": {0: curve(9.0, 8.1, 7.2), 1: curve(9.2, 8.5, 1.0), 2: curve(5.0)},
        "alone": {3: curve(1.0)},
    }
    report_figures.draw_curves(figure, curves, "base", "title")
    base, a = figure.axes
    *seeds, mean, zero = a.lines
    np.testing.assert_allclose([line.get_ydata() for line in seeds], [[0.0, 0.1, 0.2], [0.2, 0.0, np.nan]], atol=1e-9)
    np.testing.assert_allclose(mean.get_ydata(), [0.1, 0.05, np.nan])
    (band,) = a.collections
    corners = band.get_paths()[0].vertices
    assert {(x, round(y, 6)) for x, y in corners} >= {(1.0, 0.0), (1.0, 0.2), (2.0, 0.0), (2.0, 0.1)}
    assert corners[:, 0].max() == 2.0
    np.testing.assert_allclose(base.lines[-1].get_ydata(), [9.0, 8.25, np.nan])
    assert (base.get_title(), a.get_title()) == ("base", "a")


def test_curves_of_a_variant_that_leaves_the_scale_say_how_far():
    figure = Figure()
    flat = {0: curve(5.0, 5.0, 5.0)}
    near = {name: {0: curve(5.0, 5.0 + shift, 5.0)} for name, shift in (("a", 0.1), ("b", 0.2), ("c", -0.1))}
    report_figures.draw_curves(figure, {"base": flat, **near, "far": {0: curve(5.0, 7.0, 8.0)}}, "base", "")
    limits = {axes.get_ylim() for axes in figure.axes[1:] if axes.get_visible()}
    assert len(limits) == 1 and max(limits)[1] < 0.5
    (text,) = [text.get_text() for axes in figure.axes for text in axes.texts]
    assert text.startswith("beyond the scale: from +0.0") and text.endswith("to +3")


def test_curves_of_runs_have_a_part_per_rate_where_the_baseline_ran(axes_of, tmp_path):
    results = [
        result_of(load_run(make_run(tmp_path / f"{name}{lr}{seed}", [4.0, 3.0], seed, lr)), name)
        for name, lr, seed in (("a", 1e-3, 0), ("b", 1e-3, 0), ("a", 2e-3, None), ("b", 2e-3, None), ("b", 3e-3, 0))
    ]
    axes = axes_of(report_figures.curves_svg, compare(results)[0])
    assert [(one.get_title(), one.get_xlabel()) for one in axes] == [(name, "tokens seen") for name in "aba"]
