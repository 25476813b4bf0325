"""Every swapped module gets the style that does for it what the plan's does."""

from types import SimpleNamespace

import pytest
import torch.nn as nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear
from mxtrain.titan.v02.styles import Columnwise, GatheringNorm, Rowwise, style_for

TWO_PROCESSES = SimpleNamespace(size=lambda: 2)
"""In the place of a mesh, which takes a process group"""


def linear(kind=MXLinear) -> MXLinear:
    return kind(128, 192, bias=False, device="meta")


def test_styles_follow_the_swapped_modules():
    norm = MXNorm(128, device="meta")

    def own(module, style):
        return style_for("layer.part", module, style, TWO_PROCESSES)

    assert type(own(norm, SequenceParallel())) is GatheringNorm
    column = own(linear(MXNormLinear), ColwiseParallel(use_local_output=False))
    assert type(column) is Columnwise and not column.use_local_output
    row = own(linear(), RowwiseParallel(output_layouts=Shard(1)))
    assert type(row) is Rowwise and row.output_layouts == (Shard(1),)
    for kept in (nn.RMSNorm(8), nn.Linear(8, 8), None):
        assert own(kept, style := RowwiseParallel()) is style

    plan = PrepareModuleInput(input_layouts=(Shard(1), Shard(0)), desired_input_layouts=(Shard(0), Shard(0)))
    attention = nn.ModuleDict({"wq": linear(MXNormLinear)})
    assert own(attention, plan).input_layouts == (None, Shard(0)) and plan.input_layouts == (Shard(1), Shard(0))
    assert own(nn.ModuleDict({"wq": linear()}), plan) is plan, "its norm gives tensors"
    problem = (
        "degree = 2 splits layer.part by PrepareModuleInput, which works in high precision only, and it is an MXNorm"
    )
    with pytest.raises(ConfigError, match=problem):
        own(norm, plan)
