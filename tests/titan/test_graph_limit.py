"""How many graphs torch.compile may make of blocks that run the same code. ``test_titan_schedule.py`` tests states."""

import pytest
import torch
import torch.nn as nn

from mxtrain import MXLinear
from mxtrain.recipes.recipe import RECIPES
from mxtrain.titan.graph_limit import GRAPHS, allow_kinds

NAMES = [name for name in RECIPES if name != "bf16"]


class Block(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.linear = MXLinear(32, 32, recipe=recipe, mode="reference")

    def forward(self, x):
        return self.linear(x)


class Model(nn.Module):
    def __init__(self, recipes):
        super().__init__()
        self.layers = nn.ModuleDict({str(i): Block(recipe) for i, recipe in enumerate(recipes)})


def limit_for(model) -> int:
    with torch._dynamo.config.patch(recompile_limit=GRAPHS, accumulated_recompile_limit=GRAPHS):
        allow_kinds(model)
        assert torch._dynamo.config.accumulated_recompile_limit == torch._dynamo.config.recompile_limit
        return torch._dynamo.config.recompile_limit


def test_every_kind_of_block_has_its_graphs():
    assert limit_for(Model(["mxfp8"] * 30)) == GRAPHS
    assert limit_for(Model(["mxfp8", "nvfp4", "mxfp8", "unquantized"])) == 3 * GRAPHS
    assert limit_for(nn.Linear(4, 4)) == GRAPHS, "a model without blocks"


@pytest.mark.parametrize("allows", [False, True])
def test_blocks_with_many_recipes_train_and_are_validated(allows):
    model, x = Model(NAMES * 2), torch.ones(2, 32)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=len(NAMES), accumulated_recompile_limit=len(NAMES)):
        if allows:
            allow_kinds(model)
        for block in model.layers.values():
            block.compile(backend="eager", fullgraph=True)
            block(x)
        with torch.no_grad():
            if not allows:
                with pytest.raises(Exception, match="recompile_limit reached|fullgraph=True"):
                    model.layers["0"](x)
                return
            for block in model.layers.values():
                block(x)
