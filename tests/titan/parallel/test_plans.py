"""Plans of tensor parallelism with mxtrain's styles: whose functions are replaced, and which gates are safe."""

import sys
from types import ModuleType

import pytest
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn as nn
import torchtitan.models.llama3.infra.parallelize as llama3_plans
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.parallel import PrepareModuleInputOutput
from torch.distributed.tensor.placement_types import Placement
from torchtitan.distributed import NoParallel
from torchtitan.distributed.expert_parallel import TensorParallel

from mxtrain.titan.parallel import plans
from mxtrain.titan.parallel.expert_styles import Replicated, SplitExperts
from mxtrain.titan.parallel.plans import plans_with_own_styles


def test_plans_of_a_users_own_module_are_followed(monkeypatch):
    own, original = ModuleType("own_plans"), torch_parallel.parallelize_module
    own.parallelize_module = original
    monkeypatch.setitem(sys.modules, "own_plans", own)
    with plans_with_own_styles():
        assert own.parallelize_module is llama3_plans.parallelize_module is not original
        assert torch_parallel.parallelize_module is original, "which the replacement calls"
    assert own.parallelize_module is llama3_plans.parallelize_module is original


def mixture(output: Placement) -> tuple[nn.Module, dict]:
    block = nn.ModuleDict({"moe": nn.ModuleDict({"gate": nn.Linear(8, 4), "experts": nn.Module()})})
    style = PrepareModuleInputOutput(
        input_layouts=(Shard(1),),
        desired_input_layouts=(Replicate(),),
        use_local_input=True,
        output_layouts=(output,),
        desired_output_layouts=(Shard(1),),
    )
    return block, {"moe": style, "moe.gate": NoParallel()}


@pytest.mark.parametrize(
    "output, expected", [(Partial(), (Replicated, SplitExperts)), (Replicate(), (NoParallel, TensorParallel))]
)
def test_only_modules_within_a_boundary_get_parts_of_gradients(monkeypatch, output, expected):
    """The experts have a plan of their own, which does not say what is around them."""
    calls = []
    monkeypatch.setattr(plans, "parallelize_module", lambda module, mesh, plan: calls.append(plan))
    block, plan = mixture(output)
    own = ModuleType("own_plans")
    own.parallelize_module = plans.parallelize_module
    monkeypatch.setitem(sys.modules, "own_plans", own)
    with plans_with_own_styles() as inner:
        own.parallelize_module(block, None, plan)
        own.parallelize_module(block["moe"]["experts"], None, TensorParallel())
    of_block, of_experts = calls
    assert (type(of_block["moe.gate"]), type(of_experts)) == expected
    assert inner == (set(block["moe"].values()) if expected[0] is Replicated else set())
