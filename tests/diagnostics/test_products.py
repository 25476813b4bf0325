import math

import pytest
import torch

from mxtrain.diagnostics.products import both_products, norm_to_noise, product_totals, relative_error
from mxtrain.diagnostics.totals import combined, numbers
from mxtrain.ops.gemm import Operand


def totals_of(a, b, a_cast, b_cast):
    return numbers(product_totals({"product": both_products(a, b, Operand(a_cast), Operand(b_cast))}))["product"]


def test_error_and_ratio_by_hand():
    """[3, 4] against [3, 5]: the error's norm is 1, the product's 5."""
    totals = totals_of(torch.eye(2), torch.tensor([[3.0, 4.0]]), torch.eye(2), torch.tensor([[3.0, 5.0]]))
    assert relative_error(totals) == pytest.approx(1 / 5)
    assert norm_to_noise(totals) == pytest.approx(5.0)
    assert relative_error(combined(totals, totals)) == pytest.approx(1 / 5)


def test_a_product_without_noise():
    exact = totals_of(*[torch.eye(2)] * 4)
    assert relative_error(exact) == 0.0 and norm_to_noise(exact) == math.inf
