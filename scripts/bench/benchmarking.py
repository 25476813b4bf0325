"""Shared by all benchmark scripts: tables, JSON, bar plots, errors, kernel times and the copy bandwidth.

Importing this module puts the checkout first on the path, so that a script measures the code beside it. It also lets
memory segments grow, as ``mxtrain train`` and TorchTitan's launcher do.
"""

import functools
import json
import os
import re
import statistics
import sys
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")

import torch  # noqa: E402 - after the path is set

from mxtrain.analysis.plots import COLORS, WIDTH, in_own_style, save_picture  # noqa: E402

PACKAGES = ("torch", "triton", "torchao", "torchtitan", "liger-kernel")
COPY_BYTES = 2**30
GIB = 2**30


# Output


def machine(device_type: str) -> dict:
    """Device name and package versions, for the head of a table and of the JSON."""
    name = torch.cuda.get_device_name() if device_type == "cuda" else "CPU"
    return {"device": name, "versions": {package: _version(package) for package in PACKAGES if _version(package)}}


def _version(package: str) -> str | None:
    module = sys.modules.get(package.replace("-", "_"))
    if found := getattr(module, "__version__", None):
        return str(found)  # the loaded one, if several installations lie on the path
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def describe(facts: dict) -> str:
    """The facts of ``machine`` in one line."""
    return ", ".join([facts["device"], *(f"{name} {number}" for name, number in facts["versions"].items())])


def table(rows: Sequence[dict], columns: dict[str, str]) -> str:
    """Format one line per row: words align left, numbers right, and a missing value is a dash.

    Args:
        rows: values by column name.
        columns: format spec by column name, in order. A spec that starts with "<" marks a column of words.
    """
    cells = [list(columns)] + [[_cell(row.get(name), spec) for name, spec in columns.items()] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells)]
    left = [spec.startswith("<") for spec in columns.values()]
    return "\n".join(
        "  ".join(
            text.ljust(width) if is_left else text.rjust(width) for text, width, is_left in zip(line, widths, left)
        ).rstrip()
        for line in cells
    )


def _cell(value, spec: str) -> str:
    if value is None:
        return "-"
    return str(value) if isinstance(value, str) else format(value, spec)


def write_json(path: str | Path, content: dict) -> None:
    """Write ``content`` as JSON and create the folder if needed. NaN and infinity become strings."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(_finite(content), indent=1, allow_nan=False) + "\n")


def _finite(value):
    """Return ``value`` with NaN and infinity as strings, since JSON has no such numbers."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not -float("inf") < value < float("inf"):
        return str(value)
    return value


@in_own_style
def bar_plot(path: str | Path, panels: dict[str, dict[str, dict[str, float | None]]], ylabel: str) -> None:
    """Draw grouped bars, one panel per title: title -> group (x axis) -> bar (legend) -> height.

    Bars without a height are left out.
    """
    from matplotlib.figure import Figure  # without pyplot: needs no display and no global state

    most = max((sum(map(len, groups.values())) for groups in panels.values()), default=0)
    figure = Figure((max(WIDTH, 0.6 + 0.18 * most), 3 * max(len(panels), 1)))
    axes_of_all = figure.subplots(max(len(panels), 1), squeeze=False)[:, 0]
    for axes, (title, groups) in zip(axes_of_all, panels.items()):
        names = list(dict.fromkeys(name for bars in groups.values() for name in bars))
        width = 0.8 / max(len(names), 1)
        for index, name in enumerate(names):
            points = [(at, bars[name]) for at, bars in enumerate(groups.values()) if bars.get(name) is not None]
            positions = [at - 0.4 + (index + 0.5) * width for at, _ in points]
            heights = [height for _, height in points]
            drawn = axes.bar(positions, heights, width, color=COLORS[index % len(COLORS)], label=name)
            axes.bar_label(drawn, fmt="%.3g", fontsize=8, rotation=90, padding=2)
        axes.margins(y=0.2)  # room for the numbers on the bars
        axes.set_xticks(range(len(groups)), list(groups))
        axes.set(xlim=(-0.5, max(len(groups), 1) - 0.5), title=title, ylabel=ylabel)
        axes.grid(axis="y", alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        if names:
            axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=2)
    save_picture(figure, path)


# Errors


def report_error(error: Exception) -> str:
    """Print the traceback of ``error`` and return its type and first line, for a table.

    The frames are cleared, because each holds the tensors it worked on.
    """
    traceback.print_exception(error)
    traceback.clear_frames(error.__traceback__)
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]


# Kernels


def triton_kernels(packages: Iterable[str]) -> list:
    """Return every Triton kernel in the loaded modules of ``packages``: jitted functions and their wrappers."""
    from triton.runtime.jit import KernelInterface

    modules = [module for name, module in list(sys.modules.items()) if name.split(".")[0] in packages]
    found = [value for module in modules for value in list(vars(module).values()) if isinstance(value, KernelInterface)]
    for kernel in found:
        if isinstance(inner := getattr(kernel, "fn", None), KernelInterface):
            found.append(inner)  # the kernel inside an autotuner; the loop reaches it later
    return found


def triton_kernel_names(packages: Iterable[str]) -> set[str]:
    """Return the names of the kernels of ``packages`` in a profile."""
    return {kernel.__name__ for kernel in triton_kernels(packages) if hasattr(kernel, "__name__")}


def forget_triton_kernels(packages: Iterable[str]) -> None:
    """Clear the compiled code and tuned settings of the loaded kernels of ``packages``: the next launch is a first."""
    for kernel in triton_kernels(packages):
        for attribute in ("device_caches", "cache"):
            if hasattr(kernel, attribute):
                getattr(kernel, attribute).clear()


def device_kernels(profile: torch.profiler.profile) -> list[tuple[str, float]]:
    """Return name and microseconds of all GPU work under the profiler, in order: kernels, copies, fills."""
    events = [
        event
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not event.is_user_annotation
        and event.name != "Context Sync"  # a wait of the host, which the profiler lists under the GPU
    ]
    events.sort(key=lambda event: event.time_range.start)
    return [(event.name, event.time_range.elapsed_us()) for event in events]


_CLASSES = (
    ("attention", r"flash|sdpa|fmha|attention|cudnn_generated"),
    ("optimizer", r"multi_tensor|fused_?adam"),
    ("gemm", r"gemm|cutlass|nvjet|xmma|cublas|splitk"),
    ("inductor triton", r"^triton_"),
)


def kernel_class(name: str, ours: Iterable[str]) -> str:
    """Return the class of a kernel. ``ours`` are names of mxtrain's Triton kernels; Inductor may append a number."""
    if any(re.fullmatch(rf"{re.escape(kernel)}(_\d+)*", name) for kernel in ours):
        return "mxtrain triton"
    return next((kind for kind, pattern in _CLASSES if re.search(pattern, name, re.IGNORECASE)), "other")


def summarize_kernels(kernels: Iterable[tuple[str, float]], steps: int, ours: Iterable[str], top: int = 40) -> dict:
    """Sum device time by kernel and by class.

    Args:
        kernels: name and microseconds of every launch in ``steps`` steps.

    Returns:
        dict: ``ms`` (all kernels, per step), ``classes`` (class, ms per step, percent) and ``kernels`` (name, class,
        calls per step, us per call, ms per step, percent), both sorted by time, largest first.
    """
    ours = tuple(ours)
    durations = defaultdict(list)
    for name, microseconds in kernels:
        durations[name].append(microseconds)
    total = sum(map(sum, durations.values()))
    share = 100.0 / total if total else 0.0
    lines = [
        {
            "kernel": name[:90],
            "class": kernel_class(name, ours),
            "calls": len(times) / steps,
            "us": sum(times) / len(times),
            "ms": sum(times) / steps / 1e3,
            "%": sum(times) * share,
        }
        for name, times in sorted(durations.items(), key=lambda item: -sum(item[1]))
    ]
    kinds = defaultdict(float)
    for line in lines:
        kinds[line["class"]] += line["ms"]
    largest_first = sorted(kinds, key=kinds.get, reverse=True)
    classes = [{"class": kind, "ms": kinds[kind], "%": kinds[kind] * 1e3 * steps * share} for kind in largest_first]
    return {"ms": total / steps / 1e3, "classes": classes, "kernels": lines[:top]}


KERNEL_COLUMNS = {"kernel": "<", "class": "<", "calls": ".1f", "us": ".1f", "ms": ".3f", "%": ".1f"}
CLASS_COLUMNS = {"class": "<", "ms": ".3f", "%": ".1f"}


# Times


def bench_ms(run: Callable[[], object]) -> float:
    """Return the median milliseconds of ``run`` between CUDA events. The L2 cache is flushed before every run."""
    from triton.testing import do_bench

    return do_bench(run, warmup=25, rep=100, return_mode="median")


def profiled_ms(run: Callable[[], object], runs: int = 50) -> float:
    """Return the median over runs of the summed kernel time, in milliseconds. The L2 cache is flushed before every run.

    The sum excludes launch overhead and gaps between kernels; the time between events includes both.
    """
    # Larger than any L2 cache. Nothing else here launches cosh, so its kernel marks the start of a run.
    flush = torch.zeros(64 * 2**20, device="cuda")
    for _ in range(3):
        flush.cosh_()
        run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            flush.cosh_()
            run()
        torch.cuda.synchronize()
    return statistics.median(split_runs(device_kernels(profile), "cosh", runs)) / 1e3


def graph_ms(runs: Sequence[Callable[[], object]], replays: int = 20) -> float:
    """Return the median milliseconds per run when a CUDA graph of all ``runs``, one after the other, is replayed.

    The time includes gaps between kernels and excludes the host. The runs need different inputs that together exceed
    the L2 cache; otherwise one run finds its inputs already loaded.
    """
    stream = _graph_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for run in runs[:2]:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for run in runs:
            run()
    graph.replay()
    times = []
    for _ in range(replays):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        # The GPU sleeps until the host has queued everything below.
        torch.cuda._sleep(500_000)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / len(runs))
    return statistics.median(times)


@functools.cache
def _graph_stream() -> torch.cuda.Stream:
    # One stream for all graphs: libraries keep a workspace per stream.
    return torch.cuda.Stream()


def split_runs(kernels: Iterable[tuple[str, float]], marker: str, runs: int) -> list[float]:
    """Return the microseconds of each run. A kernel whose name contains ``marker`` starts each run.

    Args:
        kernels: name and microseconds, in order of time.

    Raises:
        RuntimeError: unless there are exactly ``runs`` runs, each with kernels.
    """
    times: list[list[float]] = []
    for name, microseconds in kernels:
        if marker in name:
            times.append([])
        elif times:
            times[-1].append(microseconds)
    if len(times) != runs or not all(times):
        raise RuntimeError(f"the profiler saw {sum(map(bool, times))} of {runs} runs")
    return [sum(each) for each in times]


def copy_bandwidth(milliseconds: Callable[[Callable[[], object]], float], moved: int = 2 * COPY_BYTES) -> float:
    """Return the bytes per second, read plus written, of a device copy that moves ``moved`` bytes."""
    source = torch.randint(0, 256, (moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return moved / (milliseconds(lambda: target.copy_(source)) / 1e3)
