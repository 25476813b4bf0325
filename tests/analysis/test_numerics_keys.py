import math

from mxtrain.analysis.numerics import (
    CAST_FIGURES,
    NORM_FIGURES,
    PRODUCT_FIGURES,
    Figure,
    by_figure,
    numerics_rows,
    split_key,
    wandb_key,
)

ROWS = [
    {"step": 10, "loss": 3.0},
    {"step": 10, "numerics/layers.10.attention.wq/fprop_error": 0.1, "numerics/layers.2.attention.wq/fprop_error": 0.2},
    {"step": 20, "numerics/layers.2.attention.wq/fprop_error": 0.3, "numerics/layers.2.attention.wq/wgrad_error": None},
]


def test_figures_by_module_and_step_in_the_order_of_the_model():
    rows = numerics_rows(ROWS)
    assert rows == ROWS[1:]
    found = by_figure(rows)
    assert found == {"fprop_error": {"layers.2.attention.wq": {10: 0.2, 20: 0.3}, "layers.10.attention.wq": {10: 0.1}}}
    assert list(found["fprop_error"]) == ["layers.2.attention.wq", "layers.10.attention.wq"]


def test_keys():
    assert split_key("numerics/layers.3.attention_norm/rms_r2") == ("layers.3.attention_norm", "rms_r2")
    assert wandb_key("numerics/layers.3.attention.wq/fprop_error") == "numerics layers.03/attention.wq fprop_error"
    assert wandb_key("numerics/model/grad_norm_to_noise") == "numerics/model grad_norm_to_noise"
    assert wandb_key("numerics/norm/rms_r2") == "numerics/norm rms_r2"


def test_what_deserves_a_look():
    figure = Figure("ratio", "ratio", 0.5, 2.0)
    assert [figure.is_noteworthy(value) for value in (0.4, 0.5, 2.0, 2.1, math.nan)] == [True, False, False, True, True]
    assert figure.limit == "below 0.5 or above 2" and Figure("x", "x").limit == ""
    assert figure.distance(0.1) > figure.distance(0.4) and not Figure("x", "x").is_noteworthy(math.inf)
    with_a_second = Figure("r2", "r2", 0.95, only_above=("std", 0.1))
    assert [with_a_second.is_noteworthy(0.5, second) for second in (0.1, 0.2, math.nan)] == [False, True, True]
    assert with_a_second.is_noteworthy(0.5), "a second figure that was not measured excuses nothing"
    figures = (*NORM_FIGURES, *PRODUCT_FIGURES, *CAST_FIGURES)
    assert len({figure.name for figure in figures}) == len(figures) == 42
