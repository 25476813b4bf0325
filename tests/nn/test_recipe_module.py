import copy

import pytest
import torch
import torch.nn as nn

from mxtrain import MXLinear, MXNorm, MXNormLinear, set_rounding_step
from mxtrain.formats.hadamard import unpack_signs
from mxtrain.formats.parse import get_recipe
from mxtrain.rng.seeds import hadamard_signs, rounding_key

SEED, FQN = 7, "layers.3.attention.wo"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def step():
    set_rounding_step(11, microbatch=2, rank=1)


def layer(recipe="nvfp4", seeded=True, **kwargs):
    linear = MXLinear(32, 64, recipe=recipe, mode="reference", **kwargs)
    if seeded:
        linear.set_seed(SEED, FQN)
    return linear


def numbers(module):
    """Of the first forward at a position."""
    set_rounding_step(11, microbatch=2, rank=1)
    return unpack_signs(module.signs(CPU)).tolist(), module.draws(CPU).tolist()


def test_numbers_follow_from_seed_name_and_position():
    signs, draws = numbers(layer())
    assert tuple(signs) == hadamard_signs(SEED, FQN)
    assert draws[0] == rounding_key(SEED, FQN)
    assert draws[1:] == [11, 2, 1]
    set_rounding_step(None)
    assert layer().draws(CPU)[0] == rounding_key(SEED, FQN)


def test_a_module_made_by_hand_has_seed_0_and_no_name():
    for module in (layer(seeded=False), MXNormLinear(32, 64, recipe="nvfp4", mode="reference")):
        signs, draws = numbers(module)
        assert tuple(signs) == hadamard_signs(0, "") and draws[0] == rounding_key(0, "")
    assert tuple(unpack_signs(MXNorm(32, recipe="nvfp4").signs(CPU)).tolist()) == hadamard_signs(0, "")


def test_only_what_the_recipe_needs():
    assert layer("mxfp8").signs(CPU) is None and layer("mxfp8").draws(CPU) is None
    assert layer(get_recipe("nvfp4", hadamard=False)).signs(CPU) is None
    assert layer(get_recipe("nvfp4", stochastic_rounding=False)).draws(CPU) is None
    assert layer(get_recipe("nvfp4", stochastic_rounding=False)).signs(CPU) is not None
    with torch.no_grad():
        assert layer().draws(CPU) is None, "there will be no backward"


def test_numbers_are_no_state_and_survive_to_empty_copies_and_casts():
    """Through conversion on the meta device and to_empty, copies, and other dtypes."""
    want = numbers(layer())
    linear = layer(device="meta")
    assert list(linear.state_dict()) == ["weight", "bias"] and not list(linear.buffers())
    model = nn.Sequential(linear)
    model.to_empty(device="cpu")
    assert numbers(linear) == want
    assert numbers(copy.deepcopy(linear)) == want
    assert numbers(linear.to(torch.bfloat16)) == want
    assert numbers(linear.to("meta")) == want


@pytest.mark.usefixtures("device")
def test_numbers_move_with_the_parameters(device):
    linear, norm = layer(device="cpu"), MXNorm(32, recipe="nvfp4", device="cpu")
    linear.to(device), norm.to(device)
    assert linear._seeds.device.type == device and norm._seeds.device.type == device
    here = torch.device(device)
    assert linear.signs(here).device.type == linear.draws(here).device.type == device
