import numpy as np
import pytest
from matplotlib.figure import Figure

from mxtrain.analysis.comparison import compare
from mxtrain.analysis.comparison_figures import differences_svg, markdown, scale
from tests.analysis.test_comparison import row

BASE = [row("base", seed, 2.0 + 0.5 * seed) for seed in range(3)]
A = [row("a", seed, 2.01 + 0.51 * seed, memory_gib=1.5, tokens_per_second=1234.0) for seed in range(3)]


@pytest.fixture
def panels_of(monkeypatch):
    """``panels_of(rows)``: the axes of a figure, which is laid out but not painted."""
    figures = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *args, **options: figures.append(figure))

    def panels_of(rows):
        differences_svg(compare(rows)[0])
        return figures[-1].axes

    return panels_of


def marked(axes, marker):
    points = [line.get_xydata() for line in axes.lines if line.get_marker() == marker]
    return [tuple(point) for own in points for point in own if np.isfinite(point).all()]


def test_the_table_has_means_errors_intervals_and_no_words_for_what_is_not_known():
    header, _, base, a = markdown(compare([*BASE, *A])[0]).splitlines()
    assert [cell.strip() for cell in base.split("|")[1:-1]] == [
        "base", "0.001", "3", "2.5000 ± 0.2887", "baseline", "2.0000 ± 0.0000", "baseline", "-", "-"
    ]  # fmt: skip
    # Differences 0.01, 0.02 and 0.03: mean 0.02, standard error 0.00577, 4.30 of them on either side.
    assert "+0.0200 [-0.0048, +0.0448] (3 pairs)" in a and a.endswith("|    1,234 | 1.50 |")
    assert len(header) == len(a)
    (_, _, _, one) = markdown(compare([row("a|b", 0, None), row("c", 0, None, 3.0)], "a|b")[0]).splitlines()
    assert [cell.strip() for cell in one.split("|")[4:8]] == ["-", "-", "3.0000", "+1.0000 (one pair)"]
    assert r"| a\|b " in markdown(compare([row("a|b", 0, 2.0)])[0])


def test_a_row_has_a_circle_per_seed_and_the_mean_and_interval_of_the_table(panels_of):
    (axes,) = panels_of([*BASE, *A])
    circles = sorted(marked(axes, "o"))
    np.testing.assert_allclose([x for x, _ in circles], [0.01, 0.02, 0.03])
    assert [y for _, y in circles] == sorted(y for _, y in circles), "seeds from top to bottom"
    ((mean, place),) = marked(axes, "D")
    assert mean == pytest.approx(0.02) and place > circles[-1][1]
    interval = axes.containers[0].lines[2][0].get_segments()[0][:, 0]
    half_width = 4.3026527 * 0.01 / 3**0.5
    np.testing.assert_allclose(sorted(interval), [0.02 - half_width, 0.02 + half_width])
    assert [text.get_text() for text in axes.texts] == ["+0.0200\n[-0.0048, +0.0448]"]
    assert axes.figure.get_suptitle() == "Validation loss minus that of base:\nllama3 tiny, 640 tokens"
    assert [text.get_text()[:6] for text in axes.figure.legends[0].texts] == ["seed 0", "seed 1", "seed 2", "mean, "]


def test_a_variant_far_from_the_others_is_an_arrow_and_the_rows_are_in_order(panels_of):
    shifts = (("far", 0.5), ("b", 0.02), ("c", -0.01))
    (axes,) = panels_of([*BASE, *(row(name, seed, 2.0 + 0.5 * seed + s) for name, s in shifts for seed in (0, 1))])
    assert [label.get_text() for label in axes.get_yticklabels()] == ["c", "b", "far"]
    low, high = axes.get_xlim()
    assert -0.02 < low < -0.01 and 0.02 < high < 0.05, "the scale is that of b and c"
    assert [x for x, _ in marked(axes, ">")] == [high] and marked(axes, "<") == []


def test_a_panel_per_learning_rate_and_one_pair_has_no_interval(panels_of):
    rows = [row(name, 0, loss, lr=lr) for lr in (1e-3, 2e-3) for name, loss in (("base", 2.0), ("a", 2.1))]
    panels = panels_of(rows)
    assert [axes.get_title(loc="left") for axes in panels] == ["learning rate 0.001", "learning rate 0.002"]
    assert [len(marked(axes, "o")) for axes in panels] == [1, 1] and marked(panels[0], "D") == []
    assert differences_svg(compare(rows[:1])[0]) == ""


def test_names_are_shown_as_they_are_and_equal_drawings_are_equal_files():
    """Matplotlib reads $...$ as math, and hides labels that begin with an underscore."""
    (group,) = compare([row(name, 0, 2.0, lr=None) for name in ("_a", "lr$x^$")])
    svg = differences_svg(group)
    assert "that of _a:</text>" in svg and ">lr$x^$</text>" in svg and svg == differences_svg(group)


@pytest.mark.parametrize(
    "extents, reach", [([0.001, 0.02, 0.03, 0.2], 0.03), ([1.0, 2.0], 2.0), ([0.0, 0.0, 1.0], 1.0), ([5.0], 5.0)]
)
def test_a_scale_ends_before_a_jump(extents, reach):
    assert scale(reversed(extents)) == reach
