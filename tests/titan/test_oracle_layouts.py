"""Gradients of FSDP, HSDP and context parallelism against one process, and what the oracle itself sees."""

import itertools
from dataclasses import replace

import pytest

from tests.support import oracle, sharded_runs
from tests.support.sharded_runs import FOUR, TWO

LONG, WHEN_LONG = "oracle of one process, long", ("unquantized", "mxfp8")


@pytest.fixture(scope="module")
def one(base) -> dict[str, oracle.Training]:
    return oracle.one_process(base)


@pytest.mark.parametrize("name", TWO)
def test_gradients_on_two_processes_match_one(base, one, name):
    recipe = name.rpartition(", ")[2]
    found = oracle.read(sharded_runs.on_two(base)[name], 2)
    oracle.require_match(one[recipe], found, recipe)


@pytest.mark.sweep
@pytest.mark.parametrize("name", FOUR)
def test_gradients_on_four_processes_match_one(base, one, name):
    recipe = name.rpartition(", ")[2]
    found = oracle.read(sharded_runs.on_four(base)[name], 4)
    oracle.require_match(one[recipe], found, recipe)


@pytest.mark.sweep
def test_every_recipe_with_context_parallelism(base, one):
    """And FSDP, or on four parts of longer sequences, those with two recipes only. With activation checkpointing."""
    long = ["--training.seq_len=256"]
    layouts = {"cp 2 x fsdp 2": oracle.layout(shard=2, context=2), "cp 4": [*oracle.layout(context=4), *long]}
    ones = {recipe: [*oracle.layout(), *long, *oracle.RECIPES[recipe]] for recipe in WHEN_LONG}
    long_ones = oracle.train(base, LONG, 1, ones)
    runs = {
        f"{name}, {mode}, {recipe}": [*flags, f"--activation_checkpoint.mode={mode}", *oracle.RECIPES[recipe]]
        for name, flags in layouts.items()
        for mode, recipe in zip(itertools.cycle(("none", "selective", "full")), oracle.RECIPES)
        if name != "cp 4" or recipe in WHEN_LONG
    }
    longer = {name: flags for name, flags in runs.items() if name.startswith("cp 4")}
    runs = oracle.following(base, runs) | oracle.following(base, longer, LONG)
    for name, found in oracle.train(base, "every recipe on four", 4, runs).items():
        recipe = name.rpartition(", ")[2]
        oracle.require_match((long_ones if name in longer else one)[recipe], found, recipe)


def test_the_oracle_names_the_worst_parameter(one):
    """A gradient that is scaled by 1.001, one that is missing, and a loss that is too large."""
    training = one["unquantized"]
    assert len(training.gradients) == oracle.STEPS
    oracle.compare(training, training, 0.0)
    names = list(training.gradients[0])
    assert "layers.1.feed_forward.w2.weight" in names and "norm.weight" in names
    scaled = [dict(gradients) for gradients in training.gradients]
    scaled[2]["norm.weight"] = 1.001 * scaled[2]["norm.weight"]
    with pytest.raises(AssertionError, match="0.001 of their norm, > 0.0001: step 3, norm.weight, .* 1.001 of"):
        oracle.compare(training, replace(training, gradients=scaled), 1e-4)
    missing = [dict(gradients) for gradients in training.gradients]
    del missing[0]["norm.weight"]
    with pytest.raises(AssertionError, match="norm.weight"):
        oracle.compare(training, replace(training, gradients=missing), 1e-4)
    losses = [2 * loss for loss in training.losses]
    with pytest.raises(AssertionError, match="step 1: loss 13"):
        oracle.compare(training, replace(training, losses=losses), 1e-4)
