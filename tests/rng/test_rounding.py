import numpy as np
import pytest
import torch

from mxtrain import set_rounding_step
from mxtrain.rng.rounding import (
    position_as_set,
    random_position,
    set_rounding_chunk,
    step_is_set,
)

pytestmark = pytest.mark.usefixtures("device")


def test_a_step_stays_until_the_next_one(device):
    assert position_as_set(device) is None and not step_is_set()
    set_rounding_step(7)
    first = position_as_set(device)
    assert first.tolist() == [7, 0, 0] and first.dtype == torch.int64 and first.device.type == device
    assert position_as_set(device) is first and step_is_set()
    set_rounding_step(2**32 - 1, microbatch=3, rank=5)
    assert position_as_set(device).tolist() == [2**32 - 1, 3, 5]
    assert first.tolist() == [7, 0, 0], "what a forward has saved does not change"


def test_the_rank_is_that_of_the_process_group(device, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 3)
    assert random_position(torch.device(device))[1:].tolist() == [0, 3]
    set_rounding_step(1)
    assert position_as_set(device).tolist() == [1, 0, 3]
    set_rounding_step(1, rank=0)
    assert position_as_set(device).tolist() == [1, 0, 0], "0 is a rank as any other"


def test_without_a_step_the_position_comes_from_pytorchs_generator(device):
    here = torch.device(device)
    torch.manual_seed(0)
    drawn = [random_position(here).tolist() for _ in range(10)]
    assert len({step for step, *_ in drawn}) == 10 and all(0 <= step < 2**32 for step, *_ in drawn)
    assert max(step for step, *_ in drawn) > 2**31
    torch.manual_seed(0)
    assert random_position(here).tolist() == drawn[0]
    set_rounding_step(1)
    set_rounding_step(None)
    assert position_as_set(device) is None and random_position(here).tolist() == drawn[1]


def test_every_chunk_of_every_microbatch_has_a_position_of_its_own(device):
    set_rounding_chunk(1, 4)
    assert position_as_set(device) is None, "no step is set"
    found = []
    for microbatch in range(3):
        set_rounding_step(7, microbatch, rank=5)
        for chunk in range(4):
            set_rounding_chunk(chunk, 4)
            found.append(position_as_set(device).tolist())
    assert found == [[7, number, 5] for number in range(12)]


def test_numpy_integers_are_numbers(device):
    set_rounding_step(np.int64(3), np.int32(2**30), np.uint8(1))
    assert position_as_set(device).tolist() == [3, 2**30, 1]
    set_rounding_chunk(np.int64(1), 3)
    assert position_as_set(device).tolist() == [3, 3 * 2**30 + 1, 1], "beyond NumPy's 32 bits"


@pytest.mark.parametrize("value", [True, np.True_, 1.0, "1"])
def test_other_values_are_no_numbers(value):
    with pytest.raises(ValueError, match=f"step = {value!r} is not an integer"):
        set_rounding_step(value)


def test_numbers_out_of_range():
    for name in ("step", "microbatch", "rank"):
        for value in (-1, 2**32):
            with pytest.raises(ValueError, match=f"{name} = {value} is not an integer from 0 to 4294967295"):
                set_rounding_step(**({"step": 0} | {name: value}))
