"""Repair of 0.2.2: replication (DDP) against one process."""

import pytest

from tests.support import oracle


def run(recipe: str, *flags: str, **degrees: int) -> list[str]:
    return [*oracle.layout(**degrees), *oracle.RECIPES[recipe], *flags]


TWO = {
    "unquantized": run("unquantized", replicate=2),
    "accumulated, mxfp8": run("mxfp8", replicate=2, accumulate=2),
}
SWEEP = {
    2: {
        "accumulated, fused_norm": run("fused_norm", replicate=2, accumulate=2),
        "full checkpointing, mxfp8": run("mxfp8", "--activation_checkpoint.mode=full", replicate=2),
        "compiled, mxfp8": run("mxfp8", "--compile.enable", "--compile.backend=aot_eager", replicate=2),
    },
    4: {"of four, mxfp8": run("mxfp8", replicate=4)},
}


@pytest.mark.parametrize("name", TWO)
def test_replicas_match_one_process(base, name):
    require_match(base, name, "replicas", 2, TWO)


@pytest.mark.sweep
@pytest.mark.parametrize("processes, name", [(processes, name) for processes in SWEEP for name in SWEEP[processes]])
def test_all_replicas_match_one_process(base, processes, name):
    require_match(base, name, f"all replicas on {processes}", processes, SWEEP[processes])


def require_match(base, name: str, group: str, processes: int, runs: dict[str, list[str]]) -> None:
    recipe, one = name.rpartition(", ")[2], oracle.one_process(base)
    found = oracle.train(base, group, processes, oracle.following(base, runs))
    oracle.require_match(one[recipe], found[name], recipe)
