"""Measure the plans of an operation on the current GPU, and write the table that ships with mxtrain.

    python scripts/bench/write_plans.py rms_norm_forward --seconds 300
    python scripts/bench/write_plans.py decompose_k --shapes 128x256x7168      time this product, and add a row for it
    python scripts/bench/write_plans.py rms_norm_backward --again              time rows again that have a time
    python scripts/bench/write_plans.py decompose_k --compare old.csv          time both tables' plans, write nothing

A row of the table has one plan for a range of shapes and is timed at its shape ``at``. From the plan of the row, or the
fastest of a few others, ``mxtrain.kernels.tuning.walk`` looks for a faster one. The row changes only for a plan that is
at least 2 % faster when both are timed again in turns.

The file is written after every row. Rows that the time does not suffice for stay as they are; another run goes on with
the rows that have no time yet. A kind of GPU without a table starts with the ranges of the H200's.

Times are microseconds per call in a CUDA graph of calls, on inputs that together exceed the L2 cache; bf16.
"""

import argparse
import datetime
import functools
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import benchmarking
import torch
from kernel_benchmark import interpreting

from mxtrain.kernels import plan_table, tuning
from mxtrain.kernels.norm import rms_norm_plan, rms_norm_tuning
from mxtrain.kernels.plan_table import H200, Operation, Row
from mxtrain.kernels.router import decompose_k_plan
from mxtrain.ops import decompose_k_tuning

# Keep the plan of a row unless another one takes less than this share of its time.
WORTH_IT = 0.98
# Times of two plans are medians of this many, taken in turns.
ROUNDS = 5
# Inputs of one graph: at least this much, over three times the L2 cache of a large GPU, and at most so many.
ROTATED_BYTES, MOST_INPUTS = 192 * 2**20, 256
FEWEST_CALLS = 8
COLUMNS = {"at": "<", "us before": ".2f", "us": ".2f", "ratio": ".3f", "tried": "d", "plan": "<"}


class Subject(NamedTuple):
    """An operation, and how to measure it.

    Attributes:
        search: (at, device) -> the search for plans, on new inputs.
        moved: at -> bytes of the inputs.
        chosen: (at, gpu) -> the current settings.
        serves: (row, gpu, settings) -> whether the settings can run all shapes in the row's ranges.
        ranges: at -> ranges of a new row; None where every shape has a row.
        small: sizes of the largest shape that the interpreter runs in a dry run.
    """

    operation: Operation
    search: Callable
    moved: Callable
    chosen: Callable
    serves: Callable
    ranges: Callable | None
    small: tuple[int, ...]


def norm_subject(operation: Operation) -> Subject:
    bf16 = torch.bfloat16
    is_forward = rms_norm_plan.is_forward(operation)
    search = rms_norm_tuning.search_forward if is_forward else rms_norm_tuning.search_backward
    inputs = 1 if is_forward else 2

    def serves(row, gpu, settings):
        longest = row.at[0], row.ranges[1][1]
        plan = rms_norm_plan.fit(operation, settings, *longest, bf16.itemsize, gpu)
        return rms_norm_plan.is_valid(plan, *longest)

    return Subject(
        operation,
        lambda at, device: search(*at, bf16, device, operation=operation),
        lambda at: inputs * 2 * math.prod(at),
        lambda at, gpu: rms_norm_plan.choose_settings(operation, *at, bf16, True, gpu).plan,
        serves,
        None,
        (8, 128),
    )


def product_subject(along_k: bool) -> Subject:
    bf16 = torch.bfloat16

    def search(at, device):
        m, n, k = at
        draw = lambda *shape: torch.randn(*shape, device=device).to(bf16)  # noqa: E731
        a, b = draw(m, k), draw(n, k).t() if along_k else draw(k, n)
        # Logits of a router are fp32.
        return decompose_k_tuning.search(a, b, torch.float32 if along_k else bf16)

    return Subject(
        decompose_k_plan.operation_of(along_k),
        search,
        lambda at: 2 * (at[0] + at[1]) * at[2],
        lambda at, gpu: decompose_k_plan.untuned(*decompose_k_plan.ranges(*at), along_k, 2, gpu).plan,
        lambda row, gpu, settings: True,
        product_ranges,
        (4, 8, 128),
    )


def product_ranges(at: tuple[int, int, int]) -> tuple[tuple[int, int], ...]:
    """The ranges of a product: those of its plan for M and K, and N with the same number of tiles."""
    m, n, k = decompose_k_plan.ranges(*at)
    return (m // 2 + 1, m), (max(n - 15, n // 2 + 1), n), (k - max(1, 2 ** (k - 1).bit_length() // 8) + 1, k)


SUBJECTS = {
    subject.operation.name: subject
    for subject in (
        *(norm_subject(operation) for pair in rms_norm_plan.OPERATIONS.values() for operation in pair),
        product_subject(True),
        product_subject(False),
    )
}


class Bench:
    """Times settings at one shape, on inputs of its own."""

    def __init__(self, subject: Subject, at: tuple[int, ...], device: torch.device, dry_run: bool):
        if dry_run:
            at = tuple(map(min, at, subject.small))
        count = 1 if dry_run else min(MOST_INPUTS, max(2, -(-ROTATED_BYTES // subject.moved(at))))
        self.searches = [subject.search(at, device) for _ in range(count)]
        self.dry_run = dry_run

    def time(self, settings) -> float:
        """Microseconds per call; infinity if the GPU lacks the resources. In a dry run a made-up number."""
        try:
            runs = [search.prepare(settings) for search in self.searches]
            if self.dry_run:
                runs[0]()
                return 10 + sum(abs(math.log2(max(value, 1)) - 2) for value in settings if isinstance(value, int))
            return 1e3 * benchmarking.graph_ms(runs * -(-FEWEST_CALLS // len(runs)), replays=10)
        except tuning.OutOfResources:
            return math.inf

    def in_turns(self, *plans) -> list[float]:
        """The time of every plan, timed in turns."""
        rounds = [[self.time(plan) for plan in plans] for _ in range(1 if self.dry_run else ROUNDS)]
        return list(map(statistics.median, zip(*rounds)))

    def improve(self, settings, serves: Callable) -> tuple[tuple, float, float, int]:
        """(settings to keep, their time, time of ``settings``, number of settings tried)

        serves: settings -> whether they may be tried.
        """
        search = self.searches[0]

        def neighbour(*step):
            other = search.neighbour(*step)
            return other if other is not None and serves(other) else None

        starts = {each: self.time(each) for each in dict.fromkeys((settings, *search.starts)) if serves(each)}
        start = min(starts, key=starts.get)
        best, times = tuning.walk(start, search.fields, neighbour, self.time)
        before, after = self.in_turns(settings, best)
        keep = best == settings or not after < WORTH_IT * before
        return settings if keep else best, before if keep else after, before, len(starts | times)


def start_rows(subject: Subject, path: Path, gpu: plan_table.GPU) -> list[Row]:
    """The rows of the file or, without a file, of this GPU's table or else of the H200's, whose times do not count."""
    if path.is_file():
        return list(plan_table.read(subject.operation, path))
    table = plan_table.table_of(subject.operation, gpu)
    rows = plan_table.rows_of(subject.operation, table or H200)
    if table == plan_table.folder_name(gpu.name):
        return list(rows)
    return [row._replace(settings=subject.chosen(row.at, gpu), us=None, us_before=None) for row in rows]


def rows_to_time(subject: Subject, rows: list[Row], args: argparse.Namespace, gpu: plan_table.GPU) -> list[int]:
    """Indices of the rows to time, those without a time first. A product without a row gets a new one."""
    if not args.shapes:
        untimed = [index for index, row in enumerate(rows) if row.us is None]
        return untimed + [index for index, row in enumerate(rows) if args.again and row.us is not None]
    found = []
    for shape in args.shapes:
        at = tuple(map(int, shape.split("x")))
        if not any(row.holds(at) for row in rows):
            if subject.ranges is None:
                raise SystemExit(f"write_plans: {shape} is in no row of {subject.operation.name}")
            rows.append(Row(subject.ranges(at), decompose_k_plan.ranges(*at), subject.chosen(at, gpu)))
        found.append(next(index for index, row in enumerate(rows) if row.holds(at)))
    return list(dict.fromkeys(found))


def order(row: Row) -> list[tuple[int, float]]:
    """Sorts rows by their last size first, as in K, N, M."""
    return [(low, math.inf if high is None else high) for low, high in reversed(row.ranges)]


def describe(settings) -> str:
    return " ".join(f"{name}={value}" for name, value in settings._asdict().items())


def measure(subject: Subject, path: Path, args: argparse.Namespace, device: torch.device) -> None:
    """Time rows and write the file until all are done or the time is up."""
    gpu, end = plan_table.gpu_of(device), time.monotonic() + args.seconds
    rows = start_rows(subject, path, gpu)
    todo, lines = rows_to_time(subject, rows, args, gpu), []
    versions = benchmarking.describe(benchmarking.machine(device.type))
    comment = (
        f"Plans of {subject.operation.name} on {gpu.name}. A shape gets the plan of the row whose ranges hold "
        f"it.\nWritten by scripts/bench/write_plans.py on {datetime.date.today()}: {versions}"
    )
    for index in todo:
        if time.monotonic() > end:
            break
        row = rows[index]
        bench = Bench(subject, row.at, device, args.dry_run)
        settings, us, before, tried = bench.improve(row.settings, functools.partial(subject.serves, row, gpu))
        rows[index] = row._replace(settings=settings, us=us, us_before=before)
        at = "x".join(map(str, row.at))
        lines.append({"at": at, "us before": before, "us": us, "ratio": us / before, "tried": tried})
        lines[-1]["plan"] = "kept" if settings == row.settings else describe(settings)
        print(f"{at}: {before:.2f} -> {us:.2f} us, {tried} tried, {lines[-1]['plan']}", flush=True)
        plan_table.write(subject.operation, path, sorted(rows, key=order), comment)
        if device.type == "cuda":
            torch.cuda.empty_cache()
    changed = [line for line in lines if line["plan"] != "kept"]
    print("\n" + (benchmarking.table(changed, COLUMNS) if changed else "no plan changed"))
    left = sum(row.us is None for row in rows)
    print(f"{len(lines)} of {len(todo)} rows timed, {len(changed)} changed; {left} of {len(rows)} have no time: {path}")


def compare(subject: Subject, other: Path, path: Path, args: argparse.Namespace, device: torch.device) -> None:
    """Time the plans of two tables in turns, at every shape where they differ, and print the ratios."""
    theirs = plan_table.read(subject.operation, other)
    rows, lines = start_rows(subject, path, plan_table.gpu_of(device)), []
    for row in rows:
        before = next((each.settings for each in theirs if each.holds(row.at)), None)
        if before is None or before == row.settings:
            continue
        us_before, us = Bench(subject, row.at, device, args.dry_run).in_turns(before, row.settings)
        at = "x".join(map(str, row.at))
        lines.append({"at": at, "us before": us_before, "us": us, "ratio": us / us_before})
        lines[-1]["plan"] = f"{describe(before)} -> {describe(row.settings)}"
        print(f"{at}: {us_before:.2f} -> {us:.2f} us, {us / us_before:.3f}", flush=True)
    if lines:
        mean = statistics.geometric_mean(line["ratio"] for line in lines)
        print("\n" + benchmarking.table(sorted(lines, key=lambda line: -line["ratio"]), COLUMNS))
        print(f"{len(lines)} of {len(rows)} rows differ; time in geometric mean {mean:.3f} of before")
    else:
        print(f"all {len(rows)} rows have the same plan")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("operation", choices=SUBJECTS)
    parser.add_argument("--shapes", nargs="+", metavar="AxB", help="only the rows that hold these shapes")
    parser.add_argument("--seconds", type=float, default=300, help="start no row after this time (default: 300)")
    parser.add_argument("--again", action="store_true", help="time rows again that have a time")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="default: the package's folder for this GPU")
    parser.add_argument("--compare", type=Path, metavar="CSV", help="time against another table; write nothing")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes and made-up times, on a CPU too")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if not torch.cuda.is_available() and not (args.dry_run and args.output and interpreting()):
        print(
            "write_plans: no CUDA device found. On a CPU there is --dry-run --output FOLDER with TRITON_INTERPRET=1.",
            file=sys.stderr,
        )
        return 1
    device = tuning.gpu() if torch.cuda.is_available() else torch.device("cpu")
    subject = SUBJECTS[args.operation]
    folder = args.output or plan_table.FOLDER / plan_table.folder_name(plan_table.gpu_of(device).name)
    path = folder / f"{subject.operation.name}.csv"
    # The user's tuned plans are neither used nor changed.
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict(os.environ, {"MXTRAIN_CACHE": cache}):
        if args.compare:
            compare(subject, args.compare, path, args, device)
        else:
            measure(subject, path, args, device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
