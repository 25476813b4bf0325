"""Gradients of FSDP, HSDP and gradient accumulation against one process."""

from dataclasses import replace

import oracle
import pytest

TOLERANCES = {"unquantized": 1e-4, "mxfp8": 5e-3, "mx_linear": 5e-3, "fused_rmsnorm": 1e-4}
TWO = {
    "fsdp 2, unquantized": [*oracle.layout(shard=2), *oracle.RECIPES["unquantized"]],
    "fsdp 2, accumulated, mxfp8": [*oracle.layout(shard=2, accumulate=2), *oracle.RECIPES["mxfp8"]],
}
FOUR = {
    "fsdp 4, mx_linear": [*oracle.layout(shard=4), *oracle.RECIPES["mx_linear"]],
    "hsdp 2 x 2, mxfp8": [*oracle.layout(replicate=2, shard=2), *oracle.RECIPES["mxfp8"]],
}


@pytest.fixture(scope="module")
def one(base) -> dict[str, oracle.Training]:
    return oracle.one_process(base)


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_gradients_match_one_process(base, one, name):
    runs, processes = (TWO, 2) if name in TWO else (FOUR, 4)
    found = oracle.train(base, f"oracle of FSDP on {processes}", processes, runs)[name]
    recipe = name.rpartition(", ")[2]
    oracle.compare(one[recipe], found, TOLERANCES[recipe])


def test_the_oracle_names_the_worst_parameter(one):
    """A gradient that is scaled by 1.001, one that is missing, and a loss that is too large."""
    training = one["unquantized"]
    assert len(training.gradients) == oracle.STEPS and oracle.compare(training, training, 0.0) == 0.0
    names = list(training.gradients[0])
    assert "layers.1.feed_forward.w2.weight" in names and "norm.weight" in names

    scaled = [dict(gradients) for gradients in training.gradients]
    scaled[2]["norm.weight"] = 1.001 * scaled[2]["norm.weight"]
    with pytest.raises(AssertionError, match="0.001 of their norm, more than 0.0001: step 3, norm.weight, .* 1.001 of"):
        oracle.compare(training, replace(training, gradients=scaled), 1e-4)
    missing = [{name: gradient for name, gradient in training.gradients[0].items() if name != "norm.weight"}]
    with pytest.raises(AssertionError, match="norm.weight"):
        oracle.compare(training, replace(training, gradients=missing), 1e-4, steps=1)
    losses = [2 * loss for loss in training.losses]
    with pytest.raises(AssertionError, match="step 1: loss 13"):
        oracle.compare(training, replace(training, losses=losses), 1e-4)
