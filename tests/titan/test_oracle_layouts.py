"""Gradients of DDP, FSDP, HSDP and context parallelism against one process, and what the oracle itself sees."""

from dataclasses import replace

import pytest

from tests.support import oracle, sharded_runs
from tests.support.sharded_runs import FOUR, TWO, TWO_SWEEP


@pytest.fixture(scope="module")
def one(base) -> dict[str, oracle.Training]:
    return oracle.one_process(base)


@pytest.mark.parametrize("name", TWO)
def test_gradients_on_two_processes_match_one(base, one, name):
    recipe = name.rpartition(", ")[2]
    found = oracle.read(sharded_runs.on_two(base)[name], 2)
    oracle.require_match(one[recipe], found, recipe)


@pytest.mark.sweep
@pytest.mark.parametrize("name", [*TWO_SWEEP, *FOUR])
def test_gradients_of_every_layout_match_one(base, one, name):
    recipe, processes = name.rpartition(", ")[2], 2 if name in TWO_SWEEP else 4
    found = oracle.read(sharded_runs.of_sweep(base, processes)[name], processes)
    oracle.require_match(one[recipe], found, recipe)


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
