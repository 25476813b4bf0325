"""Gradients of latent attention and mixtures of experts on two processes against one, under TorchTitan 0.3."""

import pytest

from mxtrain.analysis import load_run
from tests.support import oracle

MODEL = ["--model.name=deepseek_v3", "--model.converters=mxnorm"]
MODEL += ["--model_args.qk_rope_head_dim=32", "--model_args.q_lora_rank=64"]
MODEL += ["--mxnorm.diagnostics.every=2", "--mxnorm.diagnostics.tokens=64"]
MODEL += ["--mxnorm.schedule", '{from_step = 3, norm = "rmsnorm"}']
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


def test_diagnostics_on_two_processes_measure_the_tokens_of_one(base, one):
    name = "tp 2, mxfp8"
    test_gradients_on_two_processes_match_one(base, one, name)
    folders = (base / ALONE / "mxfp8", base / "two processes of 0.3" / name)
    found, expected = (
        {key: value for key, value in row.items() if key.endswith("wgrad_error") and ".experts" not in key}
        for (row,) in (load_run(folder).numerics for folder in folders)
    )
    assert len(found) == 16 and found == pytest.approx(expected, rel=0.01)
