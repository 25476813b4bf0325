import math

import pytest
import torch

from mxtrain.diagnostics.totals import Totals, combined, count, norm, numbers, ratio


def test_sums_and_squares_are_added_and_extremes_kept():
    a = Totals({"n": 2.0}, {"x": -1.0}, {"x": 3.0}, {"y": 3.0})
    b = Totals({"n": 5.0}, {"x": -4.0}, {"x": 2.0}, {"y": 4.0})
    assert combined(a, b) == Totals({"n": 7.0}, {"x": -4.0}, {"x": 3.0}, {"y": 5.0})


def test_tensors_become_numbers_in_their_places():
    found = {
        "a": Totals(
            {"n": torch.tensor(2), "m": 7.0},
            {"x": torch.tensor(-1.0)},
            {},
            {"z": torch.tensor(0.1, dtype=torch.float64)},
        ),
        "b": Totals({}, {}, {"y": 3}),
    }
    expected = {"a": Totals({"n": 2, "m": 7.0}, {"x": -1.0}, {}, {"z": 0.1}), "b": Totals({}, {}, {"y": 3})}
    assert numbers(found) == expected and numbers({}) == {}


def test_squares_of_small_gradients_and_counts_beyond_the_integers_of_fp32_are_exact():
    assert norm(torch.full((4,), 1e-30)).item() == pytest.approx(2e-30)
    assert norm(torch.full((2, 2), 3e30)).item() == pytest.approx(6e30)
    assert count(torch.ones(2**24 + 1, dtype=torch.bool)).item() == 2**24 + 1


def test_ratio_to_nothing():
    assert ratio(3, 4) == 0.75 and ratio(0, 0) == 0.0 and ratio(1, 0) == math.inf
