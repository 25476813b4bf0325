"""Tune the compiled peers of a benchmark in several processes before the one that measures needs them.

The processes compile side by side and take turns on the GPU, so that what Inductor times is not disturbed by another's
kernels. Results reach the measuring process through Inductor's and Triton's caches on disk.
"""

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import torch
from router_cases import SECTIONS, Options, Shape


class Job(NamedTuple):
    """The autotuned entries of one shape."""

    section: str
    shape: Shape
    options: Options


# Of a job's entries by name: seconds, or what went wrong.
Outcome = dict[str, float | str]


def tune_ahead(
    jobs: list[Job], processes: int, seconds: float, report: Callable[[str], None] = print
) -> dict[tuple[str, Shape], Outcome]:
    """Tune as many of ``jobs`` as end within so many seconds. What a process that dies was doing is not done.

    Returns:
        (section, shape) -> outcome, for those that were tuned.
    """
    if not jobs or processes < 1 or seconds <= 0:
        return {}
    processes = min(processes, len(jobs))
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    # Each has compile processes of its own.
    threads = str(max(1, min(4, cpus() // processes)))
    done: dict[tuple[str, Shape], Outcome] = {}
    with (
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_COMPILE_THREADS": threads}),
        context.Pool(processes, take_turns, (context.RLock(),)) as pool,
    ):
        results = pool.imap_unordered(tune, jobs)
        while len(done) < len(jobs):
            try:
                job, outcome = results.next(timeout=max(0.0, end - time.monotonic()))
            except multiprocessing.TimeoutError:
                break  # leaving ends the processes
            done[job.section, job.shape] = outcome
            report(f"tuned {job.section} {job.shape}: {describe(outcome)}")
    return done


def cpus() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0))


def describe(outcome: Outcome) -> str:
    """One line of what was tuned in how many seconds."""
    return ", ".join(f"{name} {told if isinstance(told, str) else f'{told:.1f} s'}" for name, told in outcome.items())


def take_turns(lock) -> None:
    """Hold ``lock`` whenever Inductor times something in this process."""
    from torch._inductor.runtime.benchmarking import benchmarker

    times = benchmarker.benchmark_gpu

    def alone(*args, **kwargs):
        with lock:
            return times(*args, **kwargs)

    benchmarker.benchmark_gpu = alone


def tune(job: Job) -> tuple[Job, Outcome]:
    """Compile the autotuned entries of a job by running each once."""
    outcome: Outcome = {}
    try:
        section = SECTIONS[job.section]
        entries = [entry for entry in section.entries(job.shape, job.options) if entry.autotuned]
        inputs = section.inputs(job.shape, job.options.device)
    except Exception as error:
        return job, {"setup": first_line(error)}
    torch._dynamo.reset()
    for entry in entries:
        start = time.monotonic()
        try:
            entry.make()(*inputs)
            outcome[entry.name] = time.monotonic() - start
        except Exception as error:
            outcome[entry.name] = first_line(error)
    return job, outcome


def first_line(error: Exception) -> str:
    """Type and first line of an error, whose traceback is printed."""
    traceback.print_exception(error)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
