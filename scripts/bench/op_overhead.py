#!/usr/bin/env python3
"""CPU time of an eager call of a Triton kernel: one trivial kernel as every kind of PyTorch op, and each of our ops.

    python scripts/bench/op_overhead.py --json op_overhead.json

Every way allocates a result of 1024 elements and launches the same kernel on it. Our ops are those of cast.py, norm.py
and nvfp4.py, on matrices of 64 x 64. A round enqueues many calls without waiting for the GPU, whose time per kernel is
shorter than a call's. The table shows the time of the fastest round, and how much longer it is than the bare launch.
``launches`` counts our kernels in a call.

Without a GPU, set TRITON_INTERPRET=1: the script then checks the results and times nothing.
"""

import argparse
import functools
import sys
import time
from collections.abc import Callable, Iterator
from unittest import mock

import benchmarking
import cast
import norm
import nvfp4
import torch
import triton
import triton.language as tl
from kernel_benchmark import Entry

from mxtrain.launch.launch import INTERPRETED, Launch, register_op

N = 1024
COLUMNS = {"what": "<", "launches": "d", "us per call": ".2f", "us over bare launch": ".2f", "check": "<"}
# Shape of the matrices that our ops take.
SHAPE = (64, 64)


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
    """Return the op that ``mxtrain.launch.launch.register_op`` makes."""

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


def our_ops(device: str) -> Iterator[Entry]:
    """Yield an entry for every kernel in the other benchmarks, under the names that it has there."""
    for module, sections in {"cast": cast.SECTIONS, "norm": norm.sections(), "nvfp4": nvfp4.SECTIONS}.items():
        for name, section in sections.items():
            for entry in section.entries(SHAPE, device, False):
                # These are compiled.
                if entry.ours and not entry.name.startswith("amax + cast"):
                    yield entry._replace(name=f"{module}.py {name}: {entry.name}")


def launches_in(call: Callable) -> int:
    """Return how many of our kernels a call launches."""
    with mock.patch.object(Launch, "run", autospec=True) as run:
        call()
    return run.call_count


def us_per_call(call: Callable, calls: int, rounds: int) -> float:
    """Return the CPU microseconds per call in the fastest of ``rounds`` rounds of ``calls`` calls."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        times.append((time.perf_counter() - start) / calls * 1e6)
    return min(times)


def main(argv: list[str] | None = None) -> int:
    """Check and time every way, print a table, and return 1 if a result is wrong."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--calls", type=int, default=500, help="calls per round (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=40, help="rounds per way (default: %(default)s)")
    parser.add_argument("--json", help="write the table to this file as JSON")
    args = parser.parse_args(argv)
    has_gpu = torch.cuda.is_available() and not INTERPRETED
    if not has_gpu and not INTERPRETED:
        parser.error("there is no GPU: set TRITON_INTERPRET=1 to check results without timing")
    device = "cuda" if has_gpu else "cpu"
    facts = benchmarking.machine(device)
    print(benchmarking.describe(facts))
    x = torch.arange(N, dtype=torch.float32, device=device)
    rows = []

    def add(row: dict, call: Callable) -> None:
        if has_gpu:
            row["us per call"] = us_per_call(call, args.calls, args.rounds)
            row["us over bare launch"] = row["us per call"] - rows[0]["us per call"] if rows else 0.0
        rows.append(row)

    for name, make in WAYS.items():
        row, call = {"what": name}, None
        try:
            call = functools.partial(make(), x)
            row["check"] = "ok" if torch.equal(call(), x + 1) else "wrong"
        except Exception as error:
            if has_gpu:
                raise
            row["check"] = f"skipped: {type(error).__name__} in the interpreter"
        add(row, call)
    for entry in our_ops(device):
        call = entry.make()
        check = "ok" if entry.check(call()) else "wrong"
        add({"what": entry.name, "launches": launches_in(call), "check": check}, call)
    print(benchmarking.table(rows, COLUMNS))
    if args.json:
        benchmarking.write_json(args.json, {**facts, "calls": args.calls, "rounds": args.rounds, "rows": rows})
    return 1 if any(row["check"] == "wrong" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
