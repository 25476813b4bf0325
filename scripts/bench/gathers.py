"""Bytes that a norm and its linears gather under tensor parallelism, counted at dispatch in two gloo processes.

A norm feeds three linears, as attention_norm feeds wq, wk and wv. For every recipe, kind of gather and mode of
activation checkpointing it prints the bytes of all gathers of one forward and backward, per element of the norm's input
[B, S, D]. Of these bytes, a process of P receives (P - 1) / P. Inputs are bf16, and D is ``--dim``.

Column "kept" is a checkpointing policy that saves what ``mxtrain.formats.collectives.GATHER_PARTS`` returns. Counts are
of eager code. A compiled layer repeats a gather only where its backward needs the result again, which in a transformer
block it does: attention and SiLU read the linears' outputs.

Usage:
    python scripts/bench/gathers.py
    python scripts/bench/gathers.py --recipes mxfp8,nvfp4_dynamic --dim 512
"""

import argparse
import os
import sys
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))
MODES = ("none", "full", "selective", "kept")
BATCH, SEQUENCE, OUTPUTS, LINEARS = 2, 128, 64, 3


def counts_of(recipe, gather: str, mode: str, dim: int, mesh) -> float:
    """Return the gathered bytes per element of the norm's input."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    from mxtrain.formats.collectives import GATHER_PARTS
    from tests.support.gather_counts import counted, split_block
    from tests.support.layer_checks import CHECKPOINTING, NormBlock

    def keep(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is GATHER_PARTS else CheckpointPolicy.PREFER_RECOMPUTE

    kept = partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep))
    calls = {"none": lambda module, x: module(x), **CHECKPOINTING, "kept": kept}
    block = NormBlock(dim, OUTPUTS, *[recipe] * LINEARS, mode="emulated", dtype=torch.bfloat16)
    split_block(block, mesh, gather)
    x = torch.randn(BATCH, SEQUENCE // mesh.size(), dim, dtype=torch.bfloat16, requires_grad=True)
    with counted() as counts:
        sum(y.float().sum() for y in calls[mode](block, x)).backward()
    return sum(counts) / (BATCH * SEQUENCE * dim)


def table(mesh, recipes: list[str], dim: int) -> None:
    cases = [("high_precision", "unquantized"), *(("quantized", recipe) for recipe in recipes)]
    lines = [f"{'gather':15} {'recipe':14} " + " ".join(f"{mode:>9}" for mode in MODES)]
    for gather, recipe in cases:
        found = " ".join(f"{counts_of(recipe, gather, mode, dim, mesh):9.4f}" for mode in MODES)
        lines.append(f"{gather:15} {recipe:14} {found}")
    if mesh.get_local_rank() == 0:
        print("\n".join(lines), flush=True)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", default="mxfp8,nvfp4", help="names of recipes, such as mxfp8,nvfp4_dynamic")
    parser.add_argument("--dim", type=int, default=256, help="features of the norm's input, a multiple of 32")
    options = parser.parse_args(argv)
    os.environ["TRITON_INTERPRET"] = "0"  # plain PyTorch casts: the kernels give the same codes
    from tests.support.layer_checks import in_two_processes

    in_two_processes(partial(table, recipes=options.recipes.split(","), dim=options.dim), "cpu")


if __name__ == "__main__":
    main()
