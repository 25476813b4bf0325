"""Gradients of latent attention and mixtures of experts on two processes against one, under TorchTitan 0.3."""

import pytest

from tests.support import oracle

MODEL = ["--model.name=deepseek_v3", "--model.converters=mxnorm"]
MODEL += ["--model_args.qk_rope_head_dim=32", "--model_args.q_lora_rank=64"]
ALONE = "one process of 0.3"
TWO = {
    "tp 2, mxfp8": oracle.layout(tensor=2),
    "tp 2 x ep 2, full, mxfp8": [*oracle.layout(tensor=2, expert=2), "--activation_checkpoint.mode=full"],
}


@pytest.fixture(scope="module")
def one(base) -> oracle.Training:
    return oracle.train(base, ALONE, 1, {"mxfp8": [*MODEL, *oracle.layout()]})["mxfp8"]


@pytest.mark.parametrize("name", TWO)
def test_gradients_on_two_processes_match_one(base, one, name):
    runs = oracle.following(base, {name: [*MODEL, *flags] for name, flags in TWO.items()}, ALONE)
    oracle.require_match(one, oracle.train(base, "two processes of 0.3", 2, runs)[name], "mxfp8")
