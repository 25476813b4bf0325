import weakref

import pytest
import torch

from mxtrain import set_rounding_step
from mxtrain.rng.call_number import draws_of_call
from mxtrain.rng.rounding_position import Draws, position_as_set

pytestmark = pytest.mark.usefixtures("device")

KEY = 2**63 - 5
STEP = 0x9E3779B97F4A7C15


def seeds(key=KEY):
    return torch.tensor([0, key], dtype=torch.int64)


def test_every_call_at_a_position_has_another_key_and_the_first_the_layers_own(device):
    layer, other = seeds(), seeds(3)
    for step in (7, 7, 8):
        set_rounding_step(step, microbatch=2, rank=1)
        drawn = [draws_of_call(layer, position_as_set(device)).tolist() for _ in range(5)]
        assert [draws[Draws.KEY] for draws in drawn] == [(KEY + number * STEP) % 2**63 for number in range(5)]
        assert all(draws[1:] == [step, 2, 1] for draws in drawn)
        assert draws_of_call(other, position_as_set(device))[Draws.KEY] == 3, "every layer counts its own calls"


def test_a_new_layer_counts_from_zero_wherever_it_lies_in_memory(device):
    set_rounding_step(1)
    assert {int(draws_of_call(seeds(), position_as_set(device))[Draws.KEY]) for _ in range(20)} == {KEY}


def test_the_memory_of_a_layer_goes_to_no_other_layer_before_the_next_position(device):
    """Another tensor at its address would be counted as the same layer, and draw the bits of a second call."""
    set_rounding_step(1)
    layer = seeds()
    draws_of_call(layer, position_as_set(device))
    kept = weakref.ref(layer)
    del layer
    assert kept() is not None
    set_rounding_step(2)
    assert kept() is None
