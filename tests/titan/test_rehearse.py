"""What a rehearsal takes from a checkpoint."""

import torch
from torch import nn

from mxtrain.titan.rehearse import _give_weights


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
