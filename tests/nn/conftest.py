import pytest

from mxtrain import set_rounding_step


@pytest.fixture
def rounding_step():
    """Stochastic rounding at a known position."""
    set_rounding_step(5, microbatch=2, rank=1)
