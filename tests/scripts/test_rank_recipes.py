import importlib
import sys
from pathlib import Path

import pandas as pd
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts" / "evidence"))
rank_recipes = importlib.import_module("rank_recipes")


def test_losses_stand_beside_the_mean_errors_of_layers():
    losses = pd.DataFrame(
        [("mxnorm nvfp4 p=2", 0, 2.2), ("mxnorm nvfp4 p=2", 1, 2.3)]
        + [("mxnorm mxfp8 p=2", 0, 2.1), ("mxnorm mxfp8 p=2", 1, 2.2), ("mxnorm mxfp8 p=2", 2, 5.0)]
        + [("bf16", 0, 1.9), ("mxnorm mxfp8 p=2, Muon", 0, 1.8), ("mxnorm mxfp8 p=2, Muon", 0, 1.7)],
        columns=["variant", "seed", "validation"],
    )
    errors = pd.DataFrame(
        [("a", "nvfp4", 0.1), ("b", "nvfp4", 0.3), ("a", "mxfp8", 0.02), ("a", "mxfp4", 0.2)],
        columns=["layer", "recipe", "error"],
    )
    table = rank_recipes.by_recipe(losses, errors)
    assert [*table.index] == ["mxfp8", "nvfp4"] and [*table["error"]] == [0.02, 0.2]
    assert table.drop(columns="error").loc["nvfp4"].tolist() == [2.2, 2.3], "only seeds that all recipes have"


@pytest.mark.parametrize(("order", "r"), [([1, 2, 3, 4, 5, 6, 8, 7], 0.976), ([1, 2, 3, 4], 1), ([4, 3, 2, 1], -1)])
def test_the_interval_holds_the_rank_correlation(order, r):
    found, low, high = rank_recipes.rank_correlation(pd.Series(range(len(order))), pd.Series(order))
    assert found == pytest.approx(r, abs=1e-3) and -1 < low < high < 1
    # 0.976, eight pairs: tanh(atanh(r) -+ 1.96 sqrt((1 + r^2 / 2) / 5))
    assert abs(r) == 1 or (low, high) == pytest.approx((0.8159, 0.9971), abs=1e-4)
