import math

import matplotlib.figure
import pytest

from mxtrain.analysis import MetricsWriter, load_run
from mxtrain.analysis.numerics import by_figure, draw_numerics, limit, noteworthy, remarks
from mxtrain.errors import ConfigError


def write(folder, rows):
    folder.mkdir(exist_ok=True)
    writer = MetricsWriter(folder / "metrics.jsonl")
    for row in ({"step": 1, "loss": 2.0}, *rows):
        writer.write(row)


def row(step, r2, ratio=5.0, spread=0.2, saturated=0.0):
    key = "numerics/layers.{}.ffn_norm/{}"
    return {
        "step": step,
        **{key.format(layer, "rms_r2"): value for layer, value in enumerate(r2)},
        **{key.format(layer, "rms_ratio_std"): spread for layer in range(len(r2))},
        "numerics/layers.0.feed_forward.w1/fprop_input_saturated": saturated,
        "numerics/layers.0.feed_forward.w1/grad_norm_to_noise": ratio,
        "numerics/layers.0.feed_forward.w1/fprop_input_sqnr_db": 31.0,
    }


@pytest.fixture
def panels(tmp_path, monkeypatch):
    """``panels(*rows)``: the panels of their picture, which is not painted, by the name of their figure."""

    def panels(*rows):
        pictures = []
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda picture, *args, **_: pictures.append(picture))
        write(tmp_path / "run", rows)
        draw_numerics(load_run(tmp_path / "run"), tmp_path / "a.png")
        return {axes.get_title().partition("\n")[0]: axes for axes in pictures[0].axes if axes.get_title()}

    return panels


def test_the_picture_shows_values_and_marks(panels):
    axes = panels(row(10, [0.98, 0.99]), row(20, [0.98, 0.5]))["rms_r2"]
    assert axes.images[0].get_array().tolist() == [[0.98, 0.98], [0.99, 0.5]]
    assert [list(zip(*mark.get_data())) for mark in axes.lines] == [[(1, 1)]]


def test_a_picture_and_its_remarks(tmp_path):
    write(tmp_path / "$x^$", [row(10, [0.98, 0.99]), row(20, [0.98, 0.5])])
    path, lines = draw_numerics(load_run(tmp_path / "$x^$"), tmp_path / "numerics.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert lines == [
        "step 20: rms_r2 is below 0.95 where rms_ratio_std is above 0.1 in 1 of 2 modules; layers.1.ffn_norm: 0.5"
    ]


def test_a_low_r2_of_a_precise_estimate_has_no_cross(panels):
    """Rows of equal RMS: the ratio's spread is small, and r² says nothing."""
    found = panels(row(10, [0.4, 0.99], spread=0.05), row(20, [0.4, 0.4], spread=0.2))
    (mark,) = found["rms_r2"].lines
    assert sorted(zip(*mark.get_data())) == [(1, 0), (1, 1)], "step 20 of both modules"


def test_color_scales_cover_a_range_and_nan_deserves_a_look(panels):
    found = panels(
        {
            "step": 10,
            "numerics/wo/fprop_input_sqnr_db": 31.0,
            "numerics/wo/dgrad_grad_sqnr_db": 50.0,
            "numerics/wo/fprop_error": math.nan,
        }
    )
    scales = {title: (axes.images[0].norm.vmin, axes.images[0].norm.vmax) for title, axes in found.items()}
    assert scales == {
        "dgrad_grad_sqnr_db": (15.0, 50.0),
        "fprop_error": (0.0, 0.1),
        "fprop_input_sqnr_db": (15.0, 35.0),
    }
    assert [len(axes.lines[0].get_xdata()) for axes in found.values()] == [0, 1, 0]


def test_remarks_name_the_worst_module():
    found = {"a": {"grad_norm_to_noise": 1.6}, "b": {"grad_norm_to_noise": 1.2}, "c": {"fprop_error": math.nan}}
    row = {f"numerics/{module}/{name}": value for module, of in found.items() for name, value in of.items()}
    values = by_figure(
        [{"step": 4, "numerics/d/rms_r2": 0.1}, {"step": 5, **row, "numerics/c/grad_norm_to_noise": 9.0}]
    )
    assert remarks(values) == [
        "step 5: fprop_error is not finite in 1 of 1 modules; c: inf",
        "step 5: grad_norm_to_noise is below 1.73 in 2 of 3 modules; b: 1.2",
    ]


def test_a_run_without_figures_and_a_wrong_name_are_errors(tmp_path):
    write(tmp_path / "a", [])
    with pytest.raises(ConfigError, match="has no figures up to step 1: .* mxnorm.diagnostics.every"):
        draw_numerics(load_run(tmp_path / "a"), tmp_path / "a.png")
    with pytest.raises(ConfigError, match="is not the name of a PNG file"):
        draw_numerics(load_run(tmp_path / "a"), tmp_path / "a.pdf")


ROWS = [
    {"step": 10, "loss": 3.0},
    {"step": 10, "numerics/layers.10.attention.wq/fprop_error": 0.1, "numerics/layers.2.attention.wq/fprop_error": 0.2},
    {"step": 20, "numerics/layers.2.attention.wq/fprop_error": 0.3, "numerics/layers.2.attention.wq/wgrad_error": None},
]


def test_figures_by_module_and_step_in_the_order_of_the_model():
    table = by_figure(ROWS[1:])["fprop_error"]
    assert list(table.index) == ["layers.2.attention.wq", "layers.10.attention.wq"] and list(table) == [10, 20]
    assert table.fillna(0).values.tolist() == [[0.2, 0.3], [0.1, 0.0]]


def worthy(figure, value, spread=None):
    row = {f"numerics/a/{figure}": value} | ({} if spread is None else {"numerics/a/rms_ratio_std": spread})
    return noteworthy(figure, by_figure([{"step": 1, **row}])).loc["a", 1]


def test_what_deserves_a_look():
    found = [worthy("rms_ratio_mean", value) for value in (0.7, 0.8, 1.25, 1.3, math.nan)]
    assert found == [True, False, False, True, True]
    assert limit("rms_ratio_mean") == "below 0.8 or above 1.25" and limit("output_max") == ""
    assert [worthy("rms_r2", 0.5, spread) for spread in (0.1, 0.2, math.nan)] == [False, True, True]
    assert worthy("rms_r2", 0.5), "a spread that was not measured excuses nothing"
