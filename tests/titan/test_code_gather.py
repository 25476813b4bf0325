"""FSDP gathers codes beside other layouts: gradients against one process, and resumption with the other setting.

``tests/titan/test_oracle_layouts.py`` has FSDP and HSDP alone, ``tests/parallel/test_fsdp_gather.py`` the bytes.
"""

import pytest

from mxtrain.checkpoints.folder import read_manifest
from tests.support import oracle
from tests.support.oracle import RECIPES, layout
from tests.support.sharded_runs import CODES
from tests.support.training_runs import SAVE, Outcome, Resumed, steps

pytestmark = pytest.mark.sweep
QWEN3 = "--model.name=qwen3"
ONE = "one process with tiles"
SAVED, PLAIN = "fsdp 2, saved", "fsdp 2, saved in high precision"
# Linears of a layer are in high precision for a step, and its experts, with codes, take a plain norm.
SCHEDULED = ["--mxnorm.schedule", '{from_step = 2, until_step = 2, modules = ["layers.1"], norm = "rmsnorm"}']
TWO = {
    "fsdp 2, never resharded, dense": [*layout(shard=2), "--parallelism.fsdp_reshard_after_forward=never", *CODES],
    "fsdp 2, experts": [*layout(shard=2), QWEN3, *CODES],
    "fsdp 2, scheduled": [*layout(shard=2), QWEN3, *CODES, *SCHEDULED],
}
FOUR = {
    "tensor 2 x fsdp 2, dense": [*layout(tensor=2, shard=2), *CODES],
    "pipeline 2 x fsdp 2, dense": [*layout(pipeline=2, shard=2), *CODES],
    "fsdp 4 x expert 2, experts": [*layout(shard=4, expert=2), QWEN3, *CODES],
    "tensor 2 x fsdp 2 x expert 2, experts": [*layout(tensor=2, shard=2, expert=2), QWEN3, *CODES],
}


@pytest.fixture(scope="module")
def one(base) -> dict[str, oracle.Training]:
    runs = {"dense": [], "experts": [QWEN3], "scheduled": [QWEN3, *SCHEDULED]}
    return oracle.train(base, ONE, 1, {name: [*layout(), *RECIPES["mxfp8_2d"], *run] for name, run in runs.items()})


def outcomes(base, processes: int) -> dict[str, Outcome]:
    runs = TWO if processes == 2 else FOUR
    runs = {name: [*flags, *oracle.follow(base, name.rpartition(", ")[2], ONE)] for name, flags in runs.items()}
    if processes == 2:
        runs[SAVED] = [*layout(shard=2), *CODES, *SAVE, steps(2)]
        runs[PLAIN] = [*runs[SAVED], "--mxnorm.fsdp_gather=high_precision"]
        runs["resumed"] = Resumed(SAVED, 2, ["--mxnorm.fsdp_gather=high_precision", steps(3)])
        runs["resumed with codes"] = Resumed(PLAIN, 2, ["--mxnorm.fsdp_gather=quantized", steps(3)])
    return oracle.outcomes_of(base, f"codes on {processes}", processes, runs)


@pytest.mark.parametrize("name", [*TWO, *FOUR])
def test_gradients_match_one_process(base, one, name):
    processes = 2 if name in TWO else 4
    outcome = outcomes(base, processes)[name]
    assert "weights as codes" in outcome.output[0]
    oracle.require_match(one[name.rpartition(", ")[2]], oracle.read(outcome, processes), "mxfp8_2d")


@pytest.mark.parametrize(("saved", "resumed"), [(SAVED, "resumed"), (PLAIN, "resumed with codes")])
def test_a_run_goes_on_with_the_other_setting(base, one, saved, resumed):
    found = outcomes(base, 2)
    assert [row["loss"] for row in found[resumed].rows] == pytest.approx(one["dense"].losses, rel=1e-3)
    is_told = ["weights as codes" in found[name].output[0] for name in (saved, resumed)]
    assert is_told == [saved == SAVED, saved == PLAIN]
    codes = read_manifest(found[saved].folder / "checkpoint" / "step-2").codes
    assert ("layers.0.attention.wq" in codes) == (saved == SAVED)
