#!/usr/bin/env python3
"""CPU time of an eager call of one trivial Triton kernel, by the way it becomes a PyTorch op.

    python scripts/bench/op_overhead.py --json op_overhead.json

Every way allocates a result of 1024 elements and launches the same kernel on it. A round enqueues many calls without
waiting for the GPU, whose time per kernel is shorter than a call's. The table shows the fastest round of each way and
its distance from the bare launch.

Without a GPU, set TRITON_INTERPRET=1: the script then checks the results and times nothing.
"""

import argparse
import sys
import time
from collections.abc import Callable

import benchmarking
import torch
import triton
import triton.language as tl

from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.launch import Launch, register_op

N = 1024
COLUMNS = {"what": "<", "us per call": ".2f", "us over bare launch": ".2f", "check": "<"}


@triton.jit
def _add_one_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + i, tl.load(x_ptr + i, mask=i < n) + 1, mask=i < n)


def launch(kernel, x: torch.Tensor, **constants) -> torch.Tensor:
    """Allocate the result and launch ``kernel`` on it."""
    out = torch.empty_like(x)
    kernel[(1,)](x, out, x.numel(), **constants)
    return out


def bare() -> Callable:
    """Return a plain launch: the floor under every other way."""
    return lambda x: launch(_add_one_kernel, x, BLOCK=N)


def with_register_op() -> Callable:
    """Return the op that ``mxtrain.kernels.launch.register_op`` makes."""

    def implementation(x):
        out = torch.empty_like(x)
        return out, Launch(_add_one_kernel, (1,), (x, out, x.numel()), dict(BLOCK=N))

    return register_op("op_overhead_add_one(Tensor x) -> Tensor", implementation)


def with_triton_op() -> Callable:
    """Return the op that ``torch.library.triton_op`` makes of a launch through ``wrap_triton``."""

    @torch.library.triton_op("op_overhead::triton_op", mutates_args={})
    def add_one(x: torch.Tensor) -> torch.Tensor:
        return launch(torch.library.wrap_triton(_add_one_kernel), x, BLOCK=N)

    return add_one


def with_custom_op() -> Callable:
    """Return the op that ``torch.library.custom_op`` makes."""

    @torch.library.custom_op("op_overhead::custom_op", mutates_args={})
    def add_one(x: torch.Tensor) -> torch.Tensor:
        return launch(_add_one_kernel, x, BLOCK=N)

    add_one.register_fake(torch.empty_like)
    return add_one


def with_autotune() -> Callable:
    """Return a plain launch through ``triton.autotune`` with a single configuration."""
    kernel = triton.autotune(configs=[triton.Config({"BLOCK": N})], key=["n"])(_add_one_kernel)
    return lambda x: launch(kernel, x)


WAYS = {
    "bare launch": bare,
    "register_op": with_register_op,
    "triton_op and wrap_triton": with_triton_op,
    "custom_op": with_custom_op,
    "triton.autotune, one config": with_autotune,
}


def us_per_call(call: Callable, x: torch.Tensor, calls: int, rounds: int) -> float:
    """Return the CPU microseconds per call in the fastest of ``rounds`` rounds of ``calls`` calls."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call(x)
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)


def main() -> int:
    """Check and time every way, print a table, and return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=500, help="calls per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds per way (default: %(default)s)")
    parser.add_argument("--json", help="write the table to this file as JSON")
    args = parser.parse_args()
    has_gpu = torch.cuda.is_available() and not INTERPRETED
    if not has_gpu and not INTERPRETED:
        parser.error("there is no GPU: set TRITON_INTERPRET=1 to check results without timing")
    device = "cuda" if has_gpu else "cpu"
    facts = benchmarking.machine(device)
    print(benchmarking.describe(facts))
    x = torch.arange(N, dtype=torch.float32, device=device)
    rows = []
    for name, make in WAYS.items():
        row = {"what": name}
        try:
            call = make()
            row["check"] = "ok" if torch.equal(call(x), x + 1) else "wrong"
        except Exception as error:
            if has_gpu:
                raise
            row["check"] = f"skipped: {type(error).__name__} in the interpreter"
        if has_gpu:
            row["us per call"] = us_per_call(call, x, args.calls, args.rounds)
            row["us over bare launch"] = row["us per call"] - rows[0]["us per call"] if rows else 0.0
        rows.append(row)
    print(benchmarking.table(rows, COLUMNS))
    if args.json:
        benchmarking.write_json(args.json, {**facts, "calls": args.calls, "rounds": args.rounds, "rows": rows})
    return 1 if any(row["check"] == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
