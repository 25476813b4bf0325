"""Runs of the oracle on layouts without pipeline or tensor parallelism, shared by several test files.

A run's name ends with the name of its recipe.
"""

from pathlib import Path

from mxtrain.titan.releases import RELEASE
from tests.support import oracle
from tests.support.oracle import RECIPES, layout
from tests.support.training_runs import SAVE, Outcome, steps

COMPILED = ["--compile.enable", "--compile.backend=aot_eager"]
CODES = ["--mxnorm.recipe=mxfp8_2d", "--mxnorm.fsdp_gather=quantized"]
SELECTIVE, FULL = (f"--activation_checkpoint.mode={mode}" for mode in ("selective", "full"))
TWO = {
    "fsdp 2, compiled, unquantized": [*layout(shard=2), *COMPILED, *RECIPES["unquantized"]],
    "fsdp 2, accumulated, nvfp4": [*layout(shard=2, accumulate=2), *RECIPES["nvfp4"]],
    "cp 2, accumulated, selective, unquantized": [
        *layout(context=2, accumulate=2),
        SELECTIVE,
        *RECIPES["unquantized"],
    ],
    "cp 2, full, mixed": [*layout(context=2), FULL, *RECIPES["mixed"]],
    "fsdp 2, accumulated, codes, mxfp8_2d": [*layout(shard=2, accumulate=2), *CODES],
    "fsdp 2, muon": [*layout(shard=2), *RECIPES["muon"]],
    "ddp 2, accumulated, mxfp8": [*layout(replicate=2, accumulate=2), *RECIPES["mxfp8"]],
}
if RELEASE == "v03":  # which has no context parallelism for this attention
    TWO = {name: flags for name, flags in TWO.items() if not name.startswith("cp ")}
TWO_SWEEP = {
    "ddp 2, compiled, full, mxfp8_2d": [*layout(replicate=2), *COMPILED, FULL, *RECIPES["mxfp8_2d"]],
    "fsdp 2, compiled, e2m1 and e5m2": [*layout(shard=2), *COMPILED, *RECIPES["e2m1 and e5m2"]],
    "fsdp 2, compiled, selective, codes, mxfp8_2d": [*layout(shard=2), *COMPILED, SELECTIVE, *CODES],
    "ddp 2, dequantized": [*layout(replicate=2), *RECIPES["dequantized"]],
}
FOUR = {
    "fsdp 4, mx_linear": [*layout(shard=4), *RECIPES["mx_linear"]],
    "hsdp 2 x 2, mxfp8": [*layout(replicate=2, shard=2), *RECIPES["mxfp8"]],
    "hsdp 2 x 2, full, codes, mxfp8_2d": [*layout(replicate=2, shard=2), FULL, *CODES],
    "cp 2 x hsdp 2 x 1, unquantized": [*layout(replicate=2, context=2), *RECIPES["unquantized"]],
    "cp 2 x fsdp 2, selective, nvfp4": [*layout(shard=2, context=2), SELECTIVE, *RECIPES["nvfp4"]],
    "cp 4, full, fused_norm": [*layout(context=4), FULL, *RECIPES["fused_norm"]],
}


def on_two(base: Path) -> dict[str, Outcome]:
    oracle.outcomes_of_one(base)
    more = {
        "cp 2, validated, mxfp8": [*layout(context=2), *oracle.validated(base)],
        "cp 2, saved": [*layout(context=2), *SAVE, steps(2)],
        "qwen3, cp 2": ["--model.name=qwen3", *layout(context=2), *oracle.validated(base)],
    }
    more = {} if RELEASE == "v03" else more
    return oracle.outcomes_of(base, "sharded on two", 2, oracle.following(base, TWO) | more)


def of_sweep(base: Path, processes: int) -> dict[str, Outcome]:
    oracle.outcomes_of_one(base)
    runs = oracle.following(base, TWO_SWEEP if processes == 2 else FOUR)
    return oracle.outcomes_of(base, f"sharded sweep on {processes}", processes, runs)


def resumed_on_one(base: Path) -> Outcome:
    """How one process goes on where two have stopped."""
    flags = [*layout(), *SAVE, f"--job.dump_folder={on_two(base)['cp 2, saved'].folder}"]
    return oracle.outcomes_of(base, "sharded, then on one", 1, {"resumed": flags})["resumed"]
