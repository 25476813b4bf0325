"""Latent attention, mixtures of experts and Muon on two processes against one, under TorchTitan 0.3."""

import pytest

from mxtrain.analysis import load_run
from tests.support import oracle
from tests.support.training_runs import SAVE_EACH, Resumed
from tests.titan.test_resume import require_exact

MODEL = ["--model.name=deepseek_v3", "--model.converters=mxnorm"]
MODEL += ["--model_args.qk_rope_head_dim=32", "--model_args.q_lora_rank=64"]
MODEL += ["--mxnorm.diagnostics.every=2", "--mxnorm.diagnostics.tokens=64"]
MODEL += ["--mxnorm.schedule", '{from_step = 3, norm = "rmsnorm"}']
ALONE = "one process of 0.3"
ONE = {"mxfp8": MODEL, "muon": oracle.MUON_OF_EXPERTS}
TWO = {
    "tp 2, mxfp8": [*MODEL, *oracle.layout(tensor=2)],
    "tp 2 x ep 2, full, mxfp8": [*MODEL, *oracle.layout(tensor=2, expert=2), "--activation_checkpoint.mode=full"],
    "fsdp 2, muon": [*oracle.MUON_OF_EXPERTS, *oracle.layout(shard=2), *SAVE_EACH],
}
RESUMED = "fsdp 2, muon, resumed"


@pytest.fixture(scope="module")
def one(base) -> dict[str, oracle.Training]:
    return oracle.train(base, ALONE, 1, {name: [*flags, *oracle.layout()] for name, flags in ONE.items()})


@pytest.fixture(scope="module")
def two(base, one):
    """The outcomes of ``TWO``, and of a run that stops and goes on."""
    runs = oracle.following(base, TWO, ALONE) | {RESUMED: Resumed("fsdp 2, muon", 2)}
    return oracle.outcomes_of(base, "two processes of 0.3", 2, runs)


@pytest.mark.parametrize("name", TWO)
def test_gradients_on_two_processes_match_one(one, two, name):
    recipe = name.rpartition(", ")[2]
    oracle.require_match(one[recipe], oracle.read(two[name], 2), recipe)


def test_diagnostics_on_two_processes_measure_the_tokens_of_one(base, two):
    folders = (base / ALONE / "mxfp8", two["tp 2, mxfp8"].folder)
    found, expected = (
        {key: value for key, value in row.items() if key.endswith("wgrad_error") and ".experts" not in key}
        for (row,) in (load_run(folder).numerics for folder in folders)
    )
    assert len(found) == 16 and found == pytest.approx(expected, rel=0.01)


def test_muon_of_experts_on_two_processes_resumes_bit_for_bit(two):
    require_exact(two[RESUMED], two["fsdp 2, muon"], 3)
