"""Gradients of parallel layouts against one process: the oracle of the tests, on GPUs under NCCL or on a CPU.

For every layout and recipe it trains the tests' tiny model for 5 steps (``tests/support/oracle.py``), and prints
the largest difference of a parameter's gradient before clipping, relative to its norm, and of losses and gradient
norms. Degrees are joined by x: ddp2xfsdp2 is HSDP. A layout needs as many GPUs as the product of its degrees, where ep
(expert parallelism) does not count.

A rounding that flips changes later steps, whatever the layout: "perturbed" is one process whose initial weights differ
by 1e-7 of themselves. With --follow, each step starts from the weights that one process had there.

Usage:
    python scripts/bench/layouts.py --layouts fsdp2,ddp2xfsdp2,tp2,pp2
    python scripts/bench/layouts.py --layouts perturbed,tp2,cp2
    python scripts/bench/layouts.py --layouts tp2,cp2 --follow
    python scripts/bench/layouts.py --recipes unquantized --mode reference             fp32 products on GPUs, too
    python scripts/bench/layouts.py --layouts cp2 --dtype bfloat16 --reference fsdp2   attention needs 16 bits on GPUs
    python scripts/bench/layouts.py --model qwen3 --layouts tp2,tp2xep2,pp2 --follow

NVFP4's tensor scales are those of a pipeline's chunk, so its gradients differ from one process's without a fault.
qwen3, llama4 and deepseek_v3 have experts. TorchTitan's own multiply in bf16 in every dtype, on GPUs and under 0.3
everywhere. Every process and microbatch rounds its part of their gradients, which then differ by 2.4e-3.
In bfloat16 one process computes under autocast, and FSDP and context parallelism cast the weights: compare those two.
"""

import argparse
import re
import sys
import tempfile
from math import prod
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
DEGREES = {
    "ddp": "replicate",
    "fsdp": "shard",
    "cp": "context",
    "tp": "tensor",
    "pp": "pipeline",
    "ep": "expert",
}
ONE, PERTURBED = "one", "perturbed"
MODELS = {
    "llama3": [],
    "llama4": ["--model_args.multiple_of=64"],  # half of a feed-forward has whole blocks
    "qwen3": [],
    "deepseek_v3": ["--mxnorm.filter_fqns=output,attention"],  # where matrices are multiplied whole
}
"""Model -> flags with which tensor parallelism takes it"""


def degrees(layout: str) -> dict[str, int]:
    """Return the degrees of a layout by the names of the oracle's parameters: "cp2xfsdp2" or "one"."""
    if layout in (ONE, PERTURBED):
        return {}
    found = [re.fullmatch(r"([a-z]+)(\d+)", part) for part in layout.split("x")]
    if not all(match and match[1] in DEGREES for match in found):
        allowed = f"{ONE!r}, {PERTURBED!r}, or some of {', '.join(DEGREES)} with numbers"
        raise argparse.ArgumentTypeError(f"{layout!r} is not {allowed}")
    return {DEGREES[match[1]]: int(match[2]) for match in found}


def layouts(text: str) -> list[str]:
    names = text.split(",")
    for name in names:
        degrees(name)
    return names


def layout(text: str) -> str:
    degrees(text)
    return text


def train(base: Path, name: str, recipes: list[str], common: list[str], repeat: int, follow: str = "") -> dict:
    """Train all recipes on one layout. Return what every recipe gave: a training, or why it failed.

    Args:
        common: flags of all runs.
        repeat: 0 for the reference, 1 for others.
        follow: "" or the reference, a layout of one process whose weights each step starts from.
    """
    from tests.support import oracle

    processes = prod(degree for kind, degree in degrees(name).items() if kind != "expert")
    flags = [*oracle.layout(**degrees(name)), *common]
    followed = {recipe: oracle.follow(base, recipe, f"{follow} 0") if follow else [] for recipe in recipes}
    runs = {recipe: [*flags, *oracle.RECIPES[recipe], *followed[recipe]] for recipe in recipes}
    results = {}
    outcomes = oracle.outcomes_of(base, f"{name} {repeat}", processes, runs, perturbed=name == PERTURBED)
    for recipe, outcome in outcomes.items():
        try:
            results[recipe] = oracle.read(outcome, processes)
        except AssertionError as error:
            results[recipe] = str(error).strip().splitlines()[-1]
    return results


def differences(one, other) -> tuple[float, float, float]:
    """Return the largest relative difference of a gradient, of losses and of gradient norms."""
    from tests.support import oracle

    def largest(expected: list[float], found: list[float]) -> float:
        return max(abs(b - a) / abs(a) for a, b in zip(expected, found, strict=True))

    norms = largest(one.grad_norms, other.grad_norms)
    gradient = max(difference for difference, _ in oracle.differences(one, other))
    return gradient, largest(one.losses, other.losses), norms


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layouts", type=layouts, default=["fsdp2"], help="such as fsdp2,tp2xfsdp2")
    parser.add_argument("--model", default="llama3", choices=[*MODELS])
    parser.add_argument("--recipes", default="unquantized,mxfp8,mx_linear,nvfp4", help="names of the oracle's recipes")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--reference", type=layout, default=ONE, help="layout to compare with")
    parser.add_argument("--follow", action="store_true", help="start each step from the weights of one process")
    parser.add_argument("--mode", default="auto", choices=["auto", "reference"], help="mode of quantized layers")
    options = parser.parse_args(argv)
    if options.follow and options.reference != ONE:
        parser.error("--follow needs the reference 'one'")

    import torch

    from tests.support import forked

    if torch.cuda.is_available():
        del forked.ENVIRONMENT["CUDA_VISIBLE_DEVICES"]  # which hides them from the tests' workers
        forked.PRELOADED.clear()  # importing some of them uses the GPU, which a process forked later then cannot
    recipes = options.recipes.split(",")
    common = [
        f"--model.name={options.model}",
        *MODELS[options.model],
        f"--training.mixed_precision_param={options.dtype}",
        f"--mxnorm.mode={options.mode}",
    ]
    backend = "NCCL" if torch.cuda.is_available() else "gloo"
    print(f"{options.model}, relative to {options.reference}, {options.dtype}, {backend}")
    print(f"{'layout':16} {'recipe':14} {'gradient':>9} {'loss':>9} {'norm':>9}")
    follow = ONE if options.follow else ""
    with tempfile.TemporaryDirectory() as folder:
        references = train(Path(folder), options.reference, recipes, common, repeat=0)
        for name in options.layouts:
            for recipe, result in train(Path(folder), name, recipes, common, 1, follow).items():
                failed = next((text for text in (references[recipe], result) if isinstance(text, str)), None)
                row = failed or " ".join(f"{value:9.1e}" for value in differences(references[recipe], result))
                print(f"{name:16} {recipe:14} {row}", flush=True)


if __name__ == "__main__":
    main()
