"""From the errors of a rehearsal to a table, the layers that stand out, and recipes within a bound."""

import math

import tomli
from matplotlib.image import imread

from mxtrain.analysis.rehearsal import draw, recipes_within, report, table_of, worst_layers, write_toml

COSTS = {"wide": 0.5, "narrow": 0.25}
ERRORS = {
    ("layers.10.w", "wide"): (0.01, 0.02, 0.01),
    ("layers.10.w", "narrow"): (0.04, 0.05, 0.04),
    ("layers.2.v", "wide"): (0.01, 0.01, 0.01),
    ("layers.2.v", "narrow"): (0.02, 0.2, 0.02),
    ("layers.2.w", "wide"): (0.01, 0.01, 0.06),
    ("layers.2.w", "narrow"): (0.01, math.nan, 0.01),
}


def test_each_layer_gets_the_cheapest_recipe_within_the_bound(tmp_path):
    errors = table_of(ERRORS)
    alone = recipes_within(errors, COSTS, 0.05, [])
    assert alone == {"layers.2.v": "wide", "layers.2.w": "bf16", "layers.10.w": "narrow"}
    assert list(alone) == ["layers.2.v", "layers.2.w", "layers.10.w"]  # in the model's order
    together = recipes_within(errors, COSTS, 0.05, [["layers.2.v", "layers.10.w"]])
    assert together == {"layers.2.v": "wide", "layers.2.w": "bf16", "layers.10.w": "wide"}
    write_toml(together, tmp_path / "recipes.toml")
    table = {"recipe": "wide", "high_precision_share": 0.0, "recipes": {"layers.2.w": "bf16"}}
    assert tomli.loads((tmp_path / "recipes.toml").read_text()) == {"mxnorm": table}


def test_table_and_picture_name_the_worst(tmp_path):
    errors = table_of(ERRORS)
    _, wide, narrow, outstanding = report(errors, COSTS, 0.05).splitlines()
    assert wide.split() == ["wide", "layers.2.w", "0.0600", "0.0100", "0.0133", "0.0267", "0.50", "2", "of", "3"]
    assert narrow.split()[:3] == ["narrow", "layers.2.w", "nan"] and narrow.endswith("1 of 3")
    assert worst_layers(errors).round(3).to_dict() == {"layers.2.w": 3.0, "layers.2.v": 1.6, "layers.10.w": 1.0}
    assert outstanding.endswith("layers.2.w (3.00), layers.2.v (1.60), layers.10.w (1.00)")
    draw(errors, "a run", tmp_path / "errors.png")
    assert imread(tmp_path / "errors.png").std() > 0
