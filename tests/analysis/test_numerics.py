import math

import matplotlib.figure
import matplotlib.text
import pytest

from mxtrain.analysis import MetricsWriter, load_run
from mxtrain.analysis.numerics import (
    CAST_FIGURES,
    FIGURES,
    SCALES,
    Figure,
    by_figure,
    draw_numerics,
    remarks,
    wandb_key,
)
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
def texts():
    """All texts in the picture of ``panels``."""
    return []


@pytest.fixture
def panels(tmp_path, monkeypatch, texts):
    """``panels(*rows)``: the panels of their picture, which is not painted, by the title of their figure."""

    def panels(*rows):
        pictures = []
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda picture, *args, **_: pictures.append(picture))
        write(tmp_path / "run", rows)
        draw_numerics(load_run(tmp_path / "run"), tmp_path / "a.png")
        texts.extend(text.get_text().replace("\n", " ") for text in pictures[0].findobj(matplotlib.text.Text))
        titles = [(axes, axes.get_title().replace("\n", " ")) for axes in pictures[0].axes]
        figures = (*FIGURES, *CAST_FIGURES)
        return {one.title: axes for one in figures for axes, title in titles if title.startswith(one.title)}

    return panels


def test_the_picture_shows_values_and_marks(panels):
    axes = panels(row(10, [0.98, 0.99]), row(20, [0.98, 0.5]))["r² of estimated and true RMS"]
    assert axes.collections[0].get_array().tolist() == [[0.98, 0.98], [0.99, 0.5]]
    assert [list(zip(*mark.get_data())) for mark in axes.lines] == [[(1.5, 1.5)]]


def test_a_picture_and_its_remarks(tmp_path):
    write(tmp_path / "$x^$", [row(10, [0.98, 0.99]), row(20, [0.98, 0.5])])
    path, lines = draw_numerics(load_run(tmp_path / "$x^$"), tmp_path / "numerics.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    assert lines == [
        "step 20: r² of estimated and true RMS is below 0.95 where rms_ratio_std is above 0.1 in 1 of 2 modules; "
        "layers.1.ffn_norm: 0.5"
    ]


def test_a_low_r2_of_a_precise_estimate_has_no_cross(panels):
    """Rows of equal RMS: the ratio's spread is small, and r² says nothing."""
    found = panels(row(10, [0.4, 0.99], spread=0.05), row(20, [0.4, 0.4], spread=0.2))
    (mark,) = found["r² of estimated and true RMS"].lines
    assert sorted(zip(*mark.get_data())) == [(1.5, 0.5), (1.5, 1.5)], "step 20 of both modules"


def test_as_many_modules_have_names_as_there_is_room_for(panels):
    linears = [f"layers.{layer}.wo" for layer in range(40)]
    errors = {f"numerics/{linear}/fprop_error": 0.03 + 0.01 * (linear == "layers.3.wo") for linear in linears}
    found = panels(row(10, [0.5, *[0.99] * 59]) | errors)
    names = {title: [text.get_text() for text in axes.get_yticklabels()] for title, axes in found.items()}
    assert names["fprop: relative error of the result"] == linears
    assert names["r² of estimated and true RMS"] == [f"layers.{layer}.ffn_norm" for layer in range(0, 60, 2)]


def test_figures_of_one_kind_have_one_color_scale_and_those_that_hardly_vary_are_named(panels, texts):
    """31.475 to 31.6 dB are one color on a scale of 20 dB. NaN, and a value below its limit, deserve a look."""
    key = "numerics/layers.{}.wo/{}"
    rows = [
        {"step": step, key.format(layer, f"{cast}_sqnr_db"): base + 0.125 * spread * (layer == 1)}
        for step in (10, 20)
        for layer in (0, 1)
        for cast, base, spread in (("fprop_input", 31.475, 1), ("fprop_weight", 31.0, 8), ("dgrad_grad", 40.0, 80))
    ]
    others = {"fprop_error": math.nan, "dgrad_error": 0.03, "grad_norm_to_noise": 1.5}
    rows += [{"step": 10, key.format(0, name): value} for name, value in others.items()]
    found = panels(*rows)
    assert list(found) == [
        "fprop: relative error of the result",
        "weight gradient: norm / quantization noise",
        "fprop: weight: SQNR (dB)",
        "dgrad: output gradient: SQNR (dB)",
    ]
    scales = [(found[name].collections[0].norm.vmin, found[name].collections[0].norm.vmax) for name in list(found)[2:]]
    assert scales == [(15.0, 50.0)] * 2
    (text,) = [text[text.index("Not drawn") :] for text in texts if "Not drawn" in text]
    same = "dgrad: relative error of the result (0.03), fprop: input: SQNR (dB) (31.48 to 31.6)."
    assert text == f"Not drawn, because they vary by less than 2 % of the color scale: {same}"


def test_remarks_name_the_worst_module():
    found = {"a": {"grad_norm_to_noise": 1.6}, "b": {"grad_norm_to_noise": 1.2}, "c": {"fprop_error": math.nan}}
    row = {f"numerics/{module}/{name}": value for module, of in found.items() for name, value in of.items()}
    values = by_figure(
        [{"step": 4, "numerics/d/rms_r2": 0.1}, {"step": 5, **row, "numerics/c/grad_norm_to_noise": 9.0}]
    )
    assert remarks(values) == [
        "step 5: fprop: relative error of the result is not finite in 1 of 1 modules; c: inf",
        "step 5: weight gradient: norm / quantization noise is below 1.73 in 2 of 3 modules; b: 1.2",
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


def test_keys_of_wandb():
    assert wandb_key("numerics/layers.3.attention.wq/fprop_error") == "numerics layers.03/attention.wq fprop_error"
    assert wandb_key("numerics/model/grad_norm_to_noise") == "numerics/model grad_norm_to_noise"
    assert wandb_key("numerics/norm/rms_r2") == "numerics/norm rms_r2"


def worthy(figure, value, second=None):
    row = {f"numerics/a/{figure.name}": value} | ({} if second is None else {"numerics/a/std": second})
    return figure.noteworthy(by_figure([{"step": 1, **row}])).loc["a", 1]


def test_what_deserves_a_look():
    figure = Figure("ratio", "ratio", "ratio", 0.5, 2.0)
    assert [worthy(figure, value) for value in (0.4, 0.5, 2.0, 2.1, math.nan)] == [True, False, False, True, True]
    assert figure.limit == "below 0.5 or above 2" and Figure("x", "x", "x").limit == ""
    with_a_second = Figure("r2", "r2", "share", 0.95, only_above=("std", 0.1))
    assert [worthy(with_a_second, 0.5, second) for second in (0.1, 0.2, math.nan)] == [False, True, True]
    assert worthy(with_a_second, 0.5), "a second figure that was not measured excuses nothing"
    figures = (*FIGURES, *CAST_FIGURES)
    assert len({figure.name for figure in figures}) == len(figures) == 54
    assert {figure.kind for figure in figures} == SCALES.keys()
