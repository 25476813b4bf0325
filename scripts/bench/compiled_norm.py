"""The residual add, MXNorm and cast of a compiled block: time, bytes moved, share of the copy bandwidth.

    python scripts/bench/compiled_norm.py --profiler              three shapes: kernel times
    python scripts/bench/compiled_norm.py --check                 results only, no times

Inputs are x and residual; results are x + residual, MXNorm's bf16 image of the sum, and rho. "fp32" is a residual
stream in fp32 beside linears in bf16, as under autocast; "bf16" is a stream in bf16. "fused" is compiled with the
passes of mxtrain.compile, "unfused" without them.

Every result is checked before it is timed. "fused" also fails if Inductor runs another operation beside the
kernel. Bytes count the tensors named above. Columns and times are those of ``cast.py``.
"""

import sys
from collections.abc import Callable
from functools import partial

import kernel_benchmark
import torch
from kernel_benchmark import Entry, Section, Shape, compiled_function, draw, is_rounding_apart, same_bits
from torch._inductor import config

from mxtrain.compile.passes import install
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.norm import mxnorm_cast
from mxtrain.formats.parse import get_recipe

RECIPE = get_recipe("mxfp8").fprop
ESTIMATE = RMSEstimate.for_recipe(RECIPE, 2, "pre_round", 1e-5)
# Tokens and width of the three models of train.py.
SHAPES = ((65536, 768), (16384, 2048), (16384, 4096))
STREAMS = {"fp32": torch.float32, "bf16": torch.bfloat16}


def fused(function: Callable, inputs: tuple) -> Callable[[], object]:
    """``function(*inputs)`` compiled with mxtrain's passes, after which the graph has one operation."""
    operations = []

    def note(graph: torch.fx.Graph) -> None:
        calls = [str(node.target) for node in graph.nodes if node.op == "call_function"]
        operations[:] = [name for name in calls if not any(view in name for view in ("view", "reshape", "getitem"))]

    with config.patch(post_grad_custom_post_pass=note, joint_custom_pre_pass=None):
        install()
        run = first_run(function, inputs)
    if len(operations) != 1:
        raise RuntimeError(f"not fused: {', '.join(operations)}")
    return run


def unfused(function: Callable, inputs: tuple) -> Callable[[], object]:
    """``function(*inputs)`` compiled with Inductor's own passes."""
    with config.patch(post_grad_custom_post_pass=None, joint_custom_pre_pass=None):
        return first_run(function, inputs)


def first_run(function: Callable, inputs: tuple) -> Callable[[], object]:
    run = partial(compiled_function(function, None), *inputs)
    run()
    return run


def norm_of_sum(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, ...]:
    total = x + residual
    result = mxnorm_cast(total, ESTIMATE, RECIPE, "image")
    return total, result.data, result.rho


def entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    found = []
    for stream, dtype in STREAMS.items():
        x, residual = inputs = draw(shape, device, dtype), draw(shape, device)

        def check(results, x=x, residual=residual) -> bool:
            # The norm of the rounded sum.
            want = mxnorm_cast(results[0], ESTIMATE, RECIPE, "image")
            is_sum = is_rounding_apart(results[0], x + residual)
            return is_sum and all(map(same_bits, results[1:], (want.data, want.rho)))

        peer = Entry(f"{stream}: unfused", partial(unfused, norm_of_sum, inputs), inputs, check)
        make = partial(fused, norm_of_sum, inputs)
        found += [peer, Entry(f"{stream}: fused", make, inputs, check, (peer.name,), ours=True)]
    return found


SECTIONS = {"forward": Section("residual add, MXNorm and cast", SHAPES, entries)}


def main(argv: list[str] | None = None) -> int:
    args = kernel_benchmark.parser(__doc__, SECTIONS).parse_args(argv)
    return kernel_benchmark.run("compiled_norm.py", SECTIONS, args)


if __name__ == "__main__":
    sys.exit(main())
