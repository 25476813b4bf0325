import math

import matplotlib.figure
import numpy as np
import pandas as pd
import pytest

from mxtrain.analysis import MetricsWriter, load_run
from mxtrain.analysis.numerics import badness, by_figure, draw_numerics, module_order, trend, worst_modules
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
def drawn(tmp_path, monkeypatch):
    """``drawn(*rows)``: their picture, which is not painted: the worst modules, and the maps by step and by figure."""

    def drawn(*rows):
        pictures = []
        monkeypatch.setattr(matplotlib.figure.Figure, "savefig", lambda picture, *args, **_: pictures.append(picture))
        write(tmp_path / "run", rows)
        draw_numerics(load_run(tmp_path / "run"), tmp_path / "a.png")
        above, below = pictures[0].subfigs
        return above.axes[0], *below.axes[:2]

    return drawn


def labels(axis):
    return [tick.get_text() for tick in axis.get_ticklabels()]


def marked(axes, modules):
    """The cells with a cross, as (module, column)."""
    (crosses,) = axes.lines
    return {(modules[down], labels(axes.xaxis)[right]) for right, down in zip(*crosses.get_data())}


def test_the_picture_shows_when_and_why_a_module_is_bad(drawn):
    worst, by_step, by_name = drawn(*(row(10 * i, [0.98, r2]) for i, r2 in enumerate([0.99, 0.5, 0.4, 0.2], start=1)))
    modules = labels(by_step.yaxis)
    assert marked(by_step, modules) == {("layers.1.ffn_norm", str(step)) for step in (20, 30, 40)}
    assert marked(by_name, modules) == {("layers.1.ffn_norm", "rms_r2")}
    texts = [text.get_text() for text in worst.get_legend().texts]
    assert texts[0] == "layers.1.ffn_norm\nrms_r2 0.2, 0.99 at the start: worse" and len(texts) == 3
    assert worst.lines[0].get_ydata()[-1] == pytest.approx(0.8 / 0.05)
    is_measured = {name: ~mask for name, mask in zip(modules, by_name.images[0].get_array().mask)}
    assert labels(by_name.xaxis) == ["rms_r2", "rms_ratio_std", "grad_norm_to_noise", "fprop_input_sqnr_db"]
    assert is_measured["layers.0.ffn_norm"].tolist() == [True, True, False, False]
    assert is_measured["layers.0.feed_forward.w1"].tolist() == [False, False, True, True]


def test_the_limit_of_changed_codes_is_the_runs(drawn, tmp_path):
    shares = {f"numerics/{module}/fprop_input_merged": share for module, share in (("a", 0.04), ("b", 0.0))}
    for limit, own in ((0.05, ""), (0.02, "merge_limit = 0.02"), (0, "merge_limit = 0")):
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.toml").write_text(f"[mxnorm]\n{own}\n")
        _, by_step, _ = drawn({"step": 10, **shares})
        assert marked(by_step, labels(by_step.yaxis)) == ({("a", "10")} if limit < 0.04 else set())


def test_the_names_of_blocks_stand_for_many_modules(drawn):
    _, by_step, _ = drawn(
        {"step": 10} | {f"numerics/layers.{i}.attention.w{name}/fprop_error": 0.1 for i in range(40) for name in "qkv"}
    )
    assert labels(by_step.yaxis) == [f"layers.{i}" for i in range(40)]


def test_a_picture_and_its_table(tmp_path):
    write(tmp_path / "$x^$", [row(10, [0.98, 0.99]), row(20, [0.98, 0.5])])
    path, table = draw_numerics(load_run(tmp_path / "$x^$"), tmp_path / "numerics.svg")
    assert ">$x^$: numerics of its modules up to step 20</text>" in path.read_text()
    assert [line.split() for line in table.splitlines()[:2]] == [
        ["worst", "modules", "figure", "now", "at", "the", "start", "trend"],
        ["layers.1.ffn_norm", "rms_r2", "0.5", "0.99", "-"],
    ]


def test_a_run_without_figures_is_an_error(tmp_path):
    write(tmp_path / "a", [])
    with pytest.raises(ConfigError, match="has no figures up to step 1: .* mxnorm.diagnostics.every"):
        draw_numerics(load_run(tmp_path / "a"), tmp_path / "a.png")


def test_figures_by_module_and_step():
    rows = [
        {"step": 10, "numerics/layers.10.wq/fprop_error": 0.1, "numerics/layers.2.wq/fprop_error": 0.2},
        {"step": 20, "numerics/layers.2.wq/fprop_error": 0.3, "numerics/layers.2.wq/wgrad_error": None},
        {"step": 20, "numerics/layers.2.wq/fprop_error": 0.4},
    ]
    (table,) = by_figure(rows).values()
    assert table.loc["layers.2.wq"].to_dict() == {10: 0.2, 20: 0.4} and list(table) == [10, 20]
    assert table.loc["layers.10.wq"].notna().tolist() == [True, False]


def test_modules_are_in_the_order_of_blocks():
    model = [f"layers.{i}.{name}" for i in (2, 10) for name in ("attention.wq", "attention_norm", "feed_forward.w1")]
    assert sorted(reversed([*model, "model"]), key=module_order) == [*model, "model"]


def bad(figure, *values, **others):
    """How bad values of a figure are, in a module each."""
    rows = {f"numerics/{module}/{figure}": value for module, value in enumerate(values)}
    rows |= {f"numerics/{module}/{name}": value for name, value in others.items() for module in range(len(values))}
    return badness(by_figure([{"step": 1, **rows}]))[figure, 1].tolist()


def test_how_bad_a_value_is():
    assert bad("rms_ratio_mean", 0.6, 0.9, 1.0, 1.25, math.nan) == pytest.approx([2, 0.5, 0, 1, math.inf])
    assert bad("rms_ratio_min", 0.5) == bad("rms_ratio_max", 2.0) == [1]
    assert bad("routing_agreement", 0.8) == pytest.approx([2])
    assert bad("grad_norm_to_noise", 3**0.5 / 2, 0.0) == pytest.approx([2, math.inf])
    assert bad("output_max_over_bound", 0.45) == [0.5]
    assert bad("fprop_error", 0.1, 0.3, 0.1, math.nan) == pytest.approx([0.5, 1.5, 0.5, math.inf]), "twice the median"
    assert bad("wgrad_error_worst_expert", 0.1, 0.4, 0.1) == pytest.approx([0.5, 2, 0.5])
    assert bad("fprop_input_sqnr_db", 30.0, 20.0, 30.0) == pytest.approx([0.5, 0.5 * 10**0.5, 0.5])
    assert bad("rms_ratio_std", 1e-8, 1e-7) == pytest.approx([5e-6, 5e-5]), "noise of rounding is not bad"
    with pytest.raises(KeyError, match="output_max"):
        bad("output_max", 9.0, rms_r2=1.0)


def test_a_low_r2_of_a_precise_estimate_is_not_bad():
    """Rows of equal RMS: the ratio's spread is small, and r² says nothing."""
    assert [bad("rms_r2", 0.5, rms_ratio_std=spread) for spread in (0.1, 0.2, math.nan)] == [[0], [10], [10]]
    assert bad("rms_r2", 0.5) == [10], "a spread that was not measured excuses nothing"


def test_the_worst_modules_are_named_once_with_their_worst_figure():
    errors = {f"numerics/{module}/dgrad_error": 0.1 for module in "abcdefg"}
    first = {"step": 4, **errors, "numerics/c/rms_r2": 0.9}
    last = {
        "step": 5,
        **errors,
        "numerics/c/dgrad_error": 0.9,
        "numerics/c/rms_r2": 0.1,
        "numerics/d/fprop_error": math.nan,
    }
    values = by_figure([first, last])
    found = worst_modules(values, badness(values))
    assert [row[0] for row in found[:2]] == ["d", "c"] and len(found) == 5
    assert found[:2] == [("d", "fprop_error", math.inf, math.inf, "-"), ("c", "rms_r2", 0.1, 0.9, "-")]


@pytest.mark.parametrize(
    "values, word",
    [
        ([1, 2, 3, 3.5, 9], "worse"),
        ([1, 2, 3, 4, 5, math.inf, 7, 8], "worse"),
        ([3, 2, 1.5, 1], "better"),
        ([1, 3, 2, 3, 1], "steady"),
        ([1, 1, 1], "steady"),
        ([1, 2], "-"),
        ([1, 1, math.inf], "-"),
    ],
)
def test_a_trend_is_more_than_noise(values, word):
    assert trend(pd.Series(values, 10 * np.arange(len(values)), dtype=float)) == word
