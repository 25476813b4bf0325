"""What a rehearsal takes from a checkpoint."""

import torch
from torch import nn

from mxtrain.formats.parse import get_recipe
from mxtrain.titan.rehearse import _give_weights, cost


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 2, bias=False)
        self.register_buffer("expert_bias", torch.zeros(2))

    def init_weights(self, buffer_device):
        nn.init.ones_(self.linear.weight)
        self.expert_bias = torch.zeros(2, device=buffer_device)


class Saved(dict):
    def load_into(self, state):
        for name, tensor in state.items():
            tensor.copy_(self[name])


def test_weights_and_buffers():
    with torch.device("meta"):
        model = Model()
    _give_weights(model, 0, torch.device("cpu"), Saved(expert_bias=torch.tensor([0.5, -0.5])))
    assert model.linear.weight.eq(1).all() and model.expert_bias.tolist() == [0.5, -0.5]


def test_cost_counts_bits_where_tensor_cores_multiply_codes():
    costs = {"mxfp8": 0.5, "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2": 0.5, "nvfp4_4over6": 0.25, "mxfp4": 1}
    costs |= {"bf16": 1, "unquantized": 1, "nvfp4_rl": 0.75, "fprop=nvfp4, dgrad=mxfp8, wgrad=bf16": 1.75 / 3}
    assert {name: cost(get_recipe(name)) for name in costs} == costs
