"""Shared by the kernel benchmarks: entries and their checks, the loop over sections and shapes, the options.

A benchmark is a table of sections. A section has shapes and a function that makes the entries for one shape. Every
result is checked before it is timed. Bytes count every input once and every output once: what must move.
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from typing import NamedTuple

import benchmarking
import torch
from torch.utils._pytree import tree_leaves

Shape = tuple[int, int]

# The summary's smallest share of the copy bandwidth skips shapes that move less than this.
MEMORY_BOUND_BYTES = 50e6


class Entry(NamedTuple):
    """One implementation to time.

    Attributes:
        name: the row's name in the table.
        make: returns the function to time, which takes no arguments and returns tensors; ``make`` may compile.
        reads: the tensors that must be read.
        check: tells whether a result is right; None if there is no reference.
        peers: names of the entries to compare with; empty for a peer.
        ours: True for mxtrain's kernels.
        note: returns a remark for the table; called after the run.
    """

    name: str
    make: Callable[[], Callable[[], object]]
    reads: tuple[torch.Tensor, ...]
    check: Callable[[object], bool] | None = None
    peers: tuple[str, ...] = ()
    ours: bool = False
    note: Callable[[], str] | None = None


class NotRun(Exception):
    """Raised by an entry's ``make`` if its kernel cannot run on this machine. The message says why."""


class Section(NamedTuple):
    """Shapes, and a function of (shape, device, add max-autotuned peers?) that returns the entries for one shape.

    An entry is compared with the first of its peers that ran or, with ``fastest``, with the fastest of them.
    """

    title: str
    shapes: tuple[Shape, ...]
    entries: Callable[[Shape, str, bool], list[Entry]]
    fastest: bool = False


# Building entries


def ours(name: str, run: Callable, reads: tuple, check: Callable, peers: tuple[str, ...]) -> Entry:
    """Return an entry for one of mxtrain's kernels."""
    return Entry(name, lambda: run, reads, check, peers, ours=True)


def compiled(
    name: str, function: Callable, args: tuple, max_autotune: bool, check: Callable | None = None
) -> list[Entry]:
    """Return entries for ``function(*args)`` under torch.compile: default mode, and optionally max-autotune."""

    def make(mode: str | None):
        fast = compiled_function(function, mode)
        return lambda: fast(*args)

    return [
        Entry(f"{name}, {word}", lambda mode=mode: make(mode), args, check)
        for word, mode in compile_modes(max_autotune).items()
    ]


def compile_modes(max_autotune: bool) -> dict[str, str | None]:
    """Return torch.compile's modes by their name in a table."""
    return {"compiled": None} | ({"max-autotune": "max-autotune-no-cudagraphs"} if max_autotune else {})


def compiled_function(function: Callable, mode: str | None) -> Callable:
    """Compile ``function`` for the shapes of its first call."""
    return torch.compile(function, dynamic=False, fullgraph=True, mode=mode)


def draw(shape: tuple[int, ...], device: str, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Return Gaussian numbers, new ones in every call."""
    return torch.randn(shape, device=device, dtype=torch.float32).to(dtype)


def tensors(result) -> list[torch.Tensor]:
    """Return every tensor in nested tuples, lists and dicts."""
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def moved_bytes(reads, result) -> int:
    """Return the bytes of the tensors in ``reads`` and in ``result``."""
    return sum(tensor.numel() * tensor.element_size() for tensor in (*tensors(reads), *tensors(result)))


# Checks


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two tensors have the same shape, dtype and bits."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def is_rounding_apart(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Return whether two results differ by at most one rounding to their dtype plus the noise of an fp32 sum."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    a, b, rounding = a.float(), b.float(), torch.finfo(a.dtype).eps
    return bool(((a - b).abs() <= rounding * b.abs() + 1e-5 * b.abs().max()).all())


# Running them


def measure(entry: Entry, milliseconds: Callable | None, bandwidth: float | None) -> dict:
    """Return one row of the table; without ``milliseconds`` only the check. Errors and ``NotRun`` become rows too."""
    row = {"what": entry.name, "ours": entry.ours}
    try:
        torch._dynamo.reset()
        run = entry.make()
        result = run()
        row["MB"] = moved_bytes(entry.reads, result) / 1e6
        if entry.note:
            row["note"] = entry.note()
        if entry.check:
            row["check"] = "ok" if entry.check(result) else "WRONG" if entry.ours else "differs"
        del result
        if milliseconds:
            ms = milliseconds(run)
            row["us"] = 1e3 * ms
            row["TB/s"] = row["MB"] / ms / 1e3
            row["of copy"] = row["TB/s"] * 1e12 / bandwidth
            if entry.ours:
                same_size = benchmarking.copy_bandwidth(milliseconds, int(row["MB"] * 1e6))
                row["of same-size copy"] = row["TB/s"] * 1e12 / same_size
    except NotRun as reason:
        row["check"] = f"not run: {reason}"
    except Exception as error:
        row["check"] = benchmarking.report_error(error)
        row["failed"] = True
    return row


def measure_shape(
    name: str, section: Section, shape: Shape, args: argparse.Namespace, bandwidth: float | None
) -> list[dict]:
    """Return the rows for one shape of a section, with ratios to the peers."""
    entries = section.entries(shape, args.device, args.max_autotune)
    if args.check:
        entries = [entry for entry in entries if entry.ours]
    rows = []
    for entry in entries:
        row = {"section": name, "shape": "x".join(map(str, shape))}
        rows.append({**row, **measure(entry, None if args.check else args.milliseconds, bandwidth)})
    microseconds = {row["what"]: row["us"] for row in rows if "us" in row}
    for entry, row in zip(entries, rows):
        ran = [peer for peer in entry.peers if peer in microseconds]
        if ran and "us" in row:
            peer = min(ran, key=microseconds.get) if section.fastest else ran[0]
            row["peer"], row["x peer"] = peer, microseconds[peer] / row["us"]
    return rows


def summarize(rows: list[dict], memory_bound: float = MEMORY_BOUND_BYTES) -> list[dict]:
    """Return one row per kernel: mean and minimum of its ratio to the peer, smallest share of the bandwidth, check."""
    summary = []
    for (section, what), group in our_rows(rows).items():
        line = {"section": section, "what": what, "shapes": len(group)}
        if ratios := [row["x peer"] for row in group if "x peer" in row]:
            line["geomean"], line["min"] = statistics.geometric_mean(ratios), min(ratios)
        large = [row["of copy"] for row in group if "of copy" in row and row["MB"] * 1e6 >= memory_bound]
        if large:
            line["min of copy"] = min(large)
        line["check"] = "ok" if all(row["check"] == "ok" for row in group) else "WRONG"
        summary.append(line)
    return summary


def our_rows(rows: list[dict]) -> dict[tuple[str, str], list[dict]]:
    """Group the rows of mxtrain's kernels by section and name."""
    groups: dict[tuple[str, str], list[dict]] = {}
    for row in rows:
        if row["ours"]:
            groups.setdefault((row["section"], row["what"]), []).append(row)
    return groups


COLUMNS = {
    "shape": "<",
    "what": "<",
    "us": ".1f",
    "MB": ".1f",
    "TB/s": ".2f",
    "of copy": ".3f",
    "of same-size copy": ".3f",
    "x peer": ".2f",
    "check": "<",
}
SUMMARY_COLUMNS = {
    "section": "<",
    "what": "<",
    "shapes": "d",
    "geomean": ".2f",
    "min": ".2f",
    "min of copy": ".3f",
    "check": "<",
}


# The command line


def parser(description: str, sections: dict[str, Section], max_autotune: bool = False) -> argparse.ArgumentParser:
    """Return a parser with the options of every kernel benchmark; ``max_autotune`` is that option's default."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--only", type=names_in(sections), default=list(sections), help=f"any of {','.join(sections)}")
    options.add_argument("--shapes", nargs="+", type=shape, help="rows x columns, such as 32768x4096, for all sections")
    options.add_argument("--profiler", action="store_true", help="time with the profiler instead of CUDA events")
    options.add_argument(
        "--max-autotune",
        action=argparse.BooleanOptionalAction,
        default=max_autotune,
        help="also time compiled peers with max-autotune",
    )
    options.add_argument("--check", action="store_true", help="compare with the reference, without timing")
    options.add_argument("--list", action="store_true", help="print sections and shapes, then exit")
    options.add_argument("--json", metavar="FILE")
    options.add_argument("--plot", metavar="FILE", help="PNG")
    return options


def names_in(sections: dict) -> Callable[[str], list[str]]:
    """Return an argparse type for a comma-separated list of section names."""

    def names(text: str) -> list[str]:
        found = text.split(",")
        if unknown := [name for name in found if name not in sections]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is not one of {','.join(sections)}")
        return found

    return names


def shape(text: str) -> Shape:
    """Parse rows and columns from text such as 32768x4096."""
    try:
        rows, columns = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 32768x4096") from None
    return rows, columns


def listing(sections: dict[str, Section], args: argparse.Namespace) -> str:
    """Return sections and shapes as text."""
    lines = []
    for name in args.only:
        shapes = ", ".join(f"{rows}x{columns}" for rows, columns in args.shapes or sections[name].shapes)
        lines.append(f"{name}: {sections[name].title}\n    {shapes}")
    return "\n".join(lines)


def run(
    name: str,
    sections: dict[str, Section],
    args: argparse.Namespace,
    columns: dict[str, str] = COLUMNS,
    memory_bound: float = MEMORY_BOUND_BYTES,
) -> int:
    """Run a benchmark, print and write its tables, and return the exit status."""
    if args.list:
        print(listing(sections, args))
        return 0
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    args.milliseconds = benchmarking.profiled_ms if args.profiler else benchmarking.bench_ms
    if not can_run(name, args):
        return 1

    facts = benchmarking.machine(args.device)
    bandwidth = None if args.check else benchmarking.copy_bandwidth(args.milliseconds)
    if bandwidth:
        facts |= {"copy TB/s": bandwidth / 1e12, "timing": "profiler" if args.profiler else "CUDA events"}
    print(benchmarking.describe(facts) + (f"; copy {bandwidth / 1e12:.2f} TB/s" if bandwidth else ""))

    rows = []
    for section in args.only:
        print(f"\n{section}: {sections[section].title}")
        for each in args.shapes or sections[section].shapes:
            new = measure_shape(section, sections[section], each, args, bandwidth)
            rows += new
            print(benchmarking.table(new, columns), flush=True)
            summary = summarize(rows, memory_bound)
            # Written after every shape: an interrupted run keeps its results.
            if args.json:
                benchmarking.write_json(args.json, {**facts, "summary": summary, "rows": rows})
            if args.plot:
                plot(args.plot, sections, rows)
            if args.device == "cuda":
                torch.cuda.empty_cache()
    print("\n" + benchmarking.table(summary, SUMMARY_COLUMNS))
    return 1 if any(line["check"] != "ok" for line in summary) else 0


def plot(path: str, sections: dict[str, Section], rows: list[dict]) -> None:
    """Draw one panel of bars per section: TB/s by shape."""
    panels: dict[str, dict[str, dict]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['section']}: {sections[row['section']].title}", {})
        panel.setdefault(row["shape"], {})[row["what"]] = row.get("TB/s")
    benchmarking.bar_plot(path, panels, "TB/s")


def can_run(name: str, args: argparse.Namespace) -> bool:
    """Return whether this machine can run a benchmark with these options; if not, say why on stderr."""
    if args.device == "cuda" or (args.check and interpreting()):
        return True
    print(
        f"{name}: no CUDA device found. Timing needs a GPU; a CPU can run --list, and --check with TRITON_INTERPRET=1 "
        "and small --shapes.",
        file=sys.stderr,
    )
    return False


def interpreting() -> bool:
    """Return whether Triton runs kernels in its interpreter, on CPU tensors."""
    from triton import knobs

    return bool(knobs.runtime.interpret)
