from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchtitan.config import Optimizer
from torchtitan.models.moe import MoE, MoEArgs
from torchtitan.protocols.train_spec import get_train_spec

import mxtrain.titan  # noqa: F401  registers the models


@pytest.mark.parametrize("name", ["llama4", "qwen3", "deepseek_v3"])
def test_a_step_balances_the_load_of_experts(name):
    torch.manual_seed(0)
    block = nn.Module()
    block.moe, block.moe_enabled = MoE(MoEArgs(num_experts=4, top_k=1, use_grouped_mm=False), 8, 8), True
    with torch.no_grad():
        block.moe.init_weights(0.1, torch.device("cpu"))
    model = nn.Module()
    model.layers = nn.ModuleDict({"0": block})
    layout = SimpleNamespace(get_optional_mesh=lambda name: None, ep_enabled=False, pp_enabled=False)
    optimizers = get_train_spec(name).build_optimizers_fn([model], Optimizer(implementation="for-loop"), layout)
    block.moe(torch.randn(1, 10, 8)).sum().backward()
    counts = block.moe.tokens_per_expert.clone()
    assert counts.sum() == 10 and not block.moe.expert_bias.any()
    optimizers.step()
    moves = 1e-3 * torch.sign(2.5 - counts)
    torch.testing.assert_close(block.moe.expert_bias, moves - moves.mean())
    assert not block.moe.tokens_per_expert.any()
