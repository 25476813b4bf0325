"""The switch between the states of a schedule: what it gives to the layers, and what it tells the user."""

import pytest
import torch
import torch.nn as nn

import mxtrain
from mxtrain import MXLinear
from mxtrain.conversion.schedule import GRAPHS, RecipeSwitch, allow_graphs, attach_schedule, set_step
from mxtrain.formats.recipe import RECIPES
from mxtrain.formats.schedule import parse_entries

PLAIN = {"from_step": 5, "until_step": 6, "norm": "rmsnorm"}


def entries(table, steps=10):
    return parse_entries([table], steps, {}, "mxnorm.schedule")


@pytest.fixture
def lines(monkeypatch):
    """What the user is told, and the events."""
    noted, logged = [], []
    monkeypatch.setattr("mxtrain.checkpoints.terminal.note", noted.append)
    return noted, logged, lambda step, text: logged.append((step, text))


def test_a_run_that_resumes_says_once_what_begins_ends_or_is_in_effect(lines, monkeypatch):
    """And gives all parts of a model the state of the step."""
    given, (noted, logged, log_event) = [], lines
    monkeypatch.setattr("mxtrain.conversion.schedule.set_step", lambda part, step: given.append(step))
    for step, expected, events in [
        (1, [], 0),
        (5, ["step 5: rmsnorm, to step 6 (mxnorm.schedule[0])"], 1),
        (6, ["in effect from step 5 to 6: rmsnorm (mxnorm.schedule[0])"], 0),
        (7, ["step 7: end of rmsnorm (mxnorm.schedule[0])"], 1),
    ]:
        for kept in (given, noted, logged):
            kept.clear()
        switch = RecipeSwitch(entries(PLAIN), [nn.Identity(), nn.Identity()], log_event)
        switch.begin_step(step)
        switch.begin_step(step)
        assert given == [step] * 2, "the second time, nothing has changed"
        assert noted == expected and len(logged) == events


class Block(nn.Module):
    def __init__(self, recipe):
        super().__init__()
        self.linear = MXLinear(32, 32, recipe=recipe, mode="reference")

    def forward(self, x):
        return self.linear(x)


NAMES = [name for name, recipe in RECIPES.items() if name != "bf16" and "fprop" in recipe.fprop.only]


def test_blocks_with_many_recipes_train_and_are_validated():
    blocks, x = [Block(recipe) for recipe in NAMES * 2], torch.ones(2, 32)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(recompile_limit=len(NAMES), accumulated_recompile_limit=len(NAMES)):
        allow_graphs(GRAPHS * len(NAMES))
        for block in blocks:
            block.compile(backend="eager", fullgraph=True)
            block(x)
        with torch.no_grad():
            for block in blocks:
                block(x)


def test_numbers_that_change_are_constants_of_compiled_graphs_and_every_state_may_be_compiled():
    model, graphs, x = nn.Sequential(nn.RMSNorm(32), nn.Linear(32, 32)), [], torch.randn(4, 32)
    plan = mxtrain.convert(model, mode="reference", filter_fqns=[], example_inputs=(x,))
    attach_schedule(model, plan.norms, entries({"from_step": 2, "until_step": 2, "norm": "rmsnorm"}))

    def keep(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    config = torch._dynamo.config
    with config.patch(recompile_limit=1000):
        allow_graphs(2)
        assert config.recompile_limit == 1000, "a user's larger limit stays"
    with config.patch(recompile_limit=1, accumulated_recompile_limit=1):
        RecipeSwitch(entries(PLAIN), [model], None)
        # Before, in and after the entry: a graph each for both layers.
        assert config.recompile_limit == config.accumulated_recompile_limit == GRAPHS + 2 * 3
        compiled = torch.compile(model, backend=keep, fullgraph=True)
        for step in (1, 2):
            set_step(model, step)
            compiled(x)
    inputs = [[node.name for node in graph.graph.nodes if node.op == "placeholder"] for graph in graphs]
    assert len(graphs) == 2 and sorted(inputs[0]) == sorted(inputs[1])
