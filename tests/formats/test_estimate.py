import math

import pytest

from mxtrain import norm_constant

# From the integral, to five decimals.
TABLE = {(1, 16): 2.07720, (2, 16): 2.13295, (1, 32): 2.34708, (2, 32): 2.38946}


@pytest.mark.parametrize(("p", "block_size"), TABLE)
def test_table(p, block_size):
    assert norm_constant(p, block_size) == pytest.approx(TABLE[p, block_size], abs=6e-6)


def test_closed_forms_for_blocks_of_one():
    assert norm_constant(1, 1) == pytest.approx(math.sqrt(2 / math.pi), rel=1e-11)
    assert norm_constant(2, 1) == pytest.approx(1.0, rel=1e-11)
