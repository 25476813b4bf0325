"""Tune the compiled peers of a benchmark in several processes, before the measuring process needs them.

The processes compile in parallel and take turns on the GPU, so that no other kernel disturbs Inductor's timings. The
results reach the measuring process through Inductor's and Triton's caches on disk.
"""

import multiprocessing
import os
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest import mock

import benchmarking
import torch
from router_cases import SECTIONS, Options, Shape


class Job(NamedTuple):
    """The autotuned entries of one shape."""

    section: str
    shape: Shape
    options: Options


# Entry of a job -> seconds of tuning, or the error as text.
Outcome = dict[str, float | str]


def tune_ahead(
    jobs: list[Job], processes: int, seconds: float, report: Callable[[str], None] = print
) -> dict[tuple[str, Shape], Outcome]:
    """Tune as many of ``jobs`` as ``seconds`` allow. The job of a process that dies is lost.

    Returns:
        (section, shape) -> outcome, for the jobs that were tuned.
    """
    if not jobs or processes < 1 or seconds <= 0:
        return {}
    processes = min(processes, len(jobs))
    end = time.monotonic() + seconds
    context = multiprocessing.get_context("spawn")
    # Each process starts compile processes of its own.
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
                break  # leaving the context ends the processes
            done[job.section, job.shape] = outcome
            report(f"tuned {job.section} {job.shape}: {describe(outcome)}")
    return done


def cpus() -> int:
    """Return the number of CPUs this process may use."""
    return len(os.sched_getaffinity(0))


def describe(outcome: Outcome) -> str:
    """Return an outcome in one line."""
    return ", ".join(
        f"{name} {result if isinstance(result, str) else f'{result:.1f} s'}" for name, result in outcome.items()
    )


def take_turns(lock) -> None:
    """Make Inductor hold ``lock`` in this process while it times kernels."""
    from torch._inductor.runtime.benchmarking import benchmarker

    times = benchmarker.benchmark_gpu

    def alone(*args, **kwargs):
        with lock:
            return times(*args, **kwargs)

    benchmarker.benchmark_gpu = alone


def tune(job: Job) -> tuple[Job, Outcome]:
    """Compile the autotuned entries of a job: run each once."""
    outcome: Outcome = {}
    try:
        section = SECTIONS[job.section]
        entries = [entry for entry in section.entries(job.shape, job.options) if entry.autotuned]
        inputs = section.inputs(job.shape, job.options.device)
    except Exception as error:
        return job, {"setup": benchmarking.report_error(error)}
    torch._dynamo.reset()
    for entry in entries:
        start = time.monotonic()
        try:
            entry.make()(*inputs)
            outcome[entry.name] = time.monotonic() - start
        except Exception as error:
            outcome[entry.name] = benchmarking.report_error(error)
    return job, outcome
