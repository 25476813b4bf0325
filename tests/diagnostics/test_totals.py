import math

import torch

from mxtrain.diagnostics.totals import Totals, combined, numbers, ratio


def test_sums_are_added_and_extremes_kept():
    a = Totals({"n": 2.0}, {"x": -1.0}, {"x": 3.0})
    b = Totals({"n": 5.0}, {"x": -4.0}, {"x": 2.0})
    assert combined(a, b) == Totals({"n": 7.0}, {"x": -4.0}, {"x": 3.0})


def test_tensors_become_numbers_in_their_places():
    found = {
        "a": Totals({"n": torch.tensor(2.0), "m": 7.0}, {"x": torch.tensor(-1.0)}, {}),
        "b": Totals({}, {}, {"y": 3}),
    }
    expected = {"a": Totals({"n": 2.0, "m": 7.0}, {"x": -1.0}, {}), "b": Totals({}, {}, {"y": 3})}
    assert numbers(found) == expected and numbers({}) == {}


def test_ratio_to_nothing():
    assert ratio(3, 4) == 0.75 and ratio(0, 0) == 0.0 and ratio(1, 0) == math.inf
