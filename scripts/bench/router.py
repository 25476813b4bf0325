"""Router matmuls by Decompose-K against PyTorch's: time, effect on the routing, gradients.

    python scripts/bench/router.py --json router.json --plot router.png        router, study and gate
    python scripts/bench/router.py --sections router --shapes '*x256x7168'     one width
    python scripts/bench/router.py --sections dispatch                         graphs with dynamic M
    python scripts/bench/router.py --quick                                     a few shapes of each section
    TRITON_INTERPRET=1 python scripts/bench/router.py --check --shapes 16x32x512     results only, also on a CPU

Shapes are M x N x K: tokens, experts, hidden. Sections:

    router    bf16 tokens [M, K] and weight [N, K]; ours returns fp32 logits, peers bf16 ones except "fp32 out"
    study     relu(A B), bf16, A [M, K] and B [K, N]
    gate      logits and both gradients; the fp32 gate multiplies in IEEE fp32, not TF32
    dispatch  graphs compiled once for all M: one contains our op, one Inductor's choice per range of M

Peers: eager, torch.compile with mode max-autotune-no-cudagraphs, and Inductor's custom-op autotuning ("custom-op"). The
last one times, at each shape, one matmul and several splits of K into a batched cuBLAS matmul and a sum.

"graph us" is the figure that counts: the median time per call in a CUDA graph of many calls, on inputs that take turns
and together exceed the L2 cache. It includes gaps between kernels and between calls. "kernel us" is the sum of a call's
kernels in the profiler, with the L2 cache flushed: no gaps, and overlapping kernels count twice. Ratios compare graph
times.

Results are compared with fp64 before they are timed. "error" is relative to the largest output; errors of gradients are
relative norms. "flips" is the share of tokens whose top 8 experts differ from those in fp64.

Inductor tunes for seconds per shape, so all shapes are tuned before the first is measured. --processes of them work in
parallel and take turns on the GPU while Inductor times; the results reach the measuring process through Inductor's
caches on disk. "compile s" is that tuning time. After --tune-seconds the remaining rows say "not tuned", and "x best"
compares with the peers that ran; "all peers" counts the shapes where all of them did.
"""

import argparse
import fnmatch
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial

import benchmarking
import torch
from kernel_benchmark import can_run, moved_bytes, names_in, our_rows
from router_cases import MAX_AUTOTUNE, SECTIONS, Entry, Options, Section, Shape
from tune_ahead import Job, Outcome, cpus, tune_ahead

# Inputs per graph: at least this many bytes, over three times the L2 cache of a large GPU, in at most MOST_SETS sets.
ROTATED_BYTES, MOST_SETS = 192 * 2**20, 1024
# Calls per graph: enough that the start of the graph does not count.
CALLS = 40
PROFILED_RUNS = 20


# Timing


def graph_us(run: Callable, new_inputs: Callable[[], tuple], inputs: tuple) -> float:
    """Return microseconds per call in a CUDA graph of calls, on enough inputs to exceed the L2 cache."""
    sets = [inputs]
    count = min(MOST_SETS, max(2, -(-ROTATED_BYTES // (moved_bytes(inputs, ()) or 1))))
    sets += [new_inputs() for _ in range(count - 1)]
    calls = [partial(run, *sets[index % count]) for index in range(max(CALLS, count))]
    return 1e3 * benchmarking.graph_ms(calls)


def kernel_us(run: Callable, inputs: tuple) -> float:
    """Return the microseconds of a call's kernels, summed."""
    return 1e3 * benchmarking.profiled_ms(partial(run, *inputs), PROFILED_RUNS)


class TuningTime:
    """The seconds left for tuning, and the outcomes of tuning ahead."""

    def __init__(self, seconds: float):
        self.left = seconds
        self.ahead: dict[tuple[str, Shape], Outcome] = {}

    def tune(self, jobs: list[Job], processes: int) -> None:
        """Tune ahead. A tenth of the time is kept for compiling what the caches then hold."""
        start = time.monotonic()
        self.ahead = tune_ahead(jobs, processes, 0.9 * self.left, partial(print, flush=True))
        self.left -= time.monotonic() - start

    def seconds_of(self, section: str, shape: Shape, name: str) -> float | None:
        """Return the seconds that tuning this ahead took; None if it was not tuned."""
        outcome = self.ahead.get((section, shape), {}).get(name)
        return outcome if isinstance(outcome, float) else None


# Running


def measure(name: str, shape: Shape, entry: Entry, inputs: tuple, args: argparse.Namespace, budget: TuningTime) -> dict:
    """Return one row of the table. An error becomes a row too."""
    section = SECTIONS[name]
    row = {"section": name, "shape": str(shape), "what": entry.name, "ours": entry.ours}
    ahead = budget.seconds_of(name, shape, entry.name)
    if entry.autotuned and ahead is None and budget.left <= 0:
        return row | {"check": "not tuned"}
    try:
        start = time.monotonic()
        run = entry.make()
        result = run(*inputs)
        seconds = time.monotonic() - start
        if entry.autotuned:
            row["compile s"] = seconds if ahead is None else ahead
            budget.left -= seconds if ahead is None else 0
        row["MB"] = moved_bytes(inputs[:2], result) / 1e6
        row |= section.judge(inputs, result)
        if entry.note:
            row["note"] = entry.note()
        if entry.ours and row["check"] != "ok":
            row["check"] = "WRONG"
        del result
        if not args.check:
            row["graph us"] = graph_us(run, partial(section.inputs, shape, args.device), inputs)
            row["of copy"] = row["MB"] / row["graph us"] * 1e12 / args.bandwidth
            try:
                row["kernel us"] = kernel_us(run, inputs)
            except RuntimeError as error:
                # The profiler sometimes loses runs. The graph time, which counts, is there.
                row["profiler"] = benchmarking.report_error(error)
    except Exception as error:
        row["check"] = benchmarking.report_error(error)
        error.__traceback__ = None
    return row


def measure_shape(name: str, shape: Shape, args: argparse.Namespace, budget: TuningTime) -> list[dict]:
    """Return the rows for one shape of a section, with our ratios to the peers."""
    section = SECTIONS[name]
    entries = section.entries(shape, args.options)
    if args.check:
        entries = [entry for entry in entries if not entry.autotuned]
    inputs = section.inputs(shape, args.device)
    rows = [measure(name, shape, entry, inputs, args, budget) for entry in entries]
    times = {row["what"]: row["graph us"] for row in rows if "graph us" in row}
    for row in rows:
        if not row["ours"] or "graph us" not in row:
            continue
        for column, peers in section.ratios.items():
            if ran := [times[peer] for peer in peers if peer in times]:
                row[column] = min(ran) / row["graph us"]
        row["all peers"] = all(peer in times for peers in section.ratios.values() for peer in peers)
    return rows


def summarize(rows: list[dict]) -> list[dict]:
    """Return a line per section and ratio of ours: geometric mean, minimum, and whether the goal is reached."""
    summary = []
    for (name, what), group in our_rows(rows).items():
        section: Section = SECTIONS[name]
        line = {"section": name, "what": what, "shapes": len(group)}
        line["all peers"] = sum(row.get("all peers", False) for row in group)
        line["check"] = "ok" if all(row["check"] == "ok" for row in group) else "WRONG"
        ratios = {column: [row[column] for row in group if column in row] for column in section.ratios}
        found = [line | ratio_line(column, values, section) for column, values in ratios.items() if values]
        summary += found or [line]
    return summary


def ratio_line(column: str, ratios: list[float], section: Section) -> dict:
    mean, least = statistics.geometric_mean(ratios), min(ratios)
    line = {"ratio": column, "geomean": mean, "min": least}
    if column in section.reach:
        wanted_mean, wanted_least = section.reach[column]
        line["wanted"] = f"{wanted_mean}" + (f", min {wanted_least}" if wanted_least else "")
        line["reached"] = "yes" if mean >= wanted_mean and least >= wanted_least else "no"
    return line


def columns_of(section: Section) -> dict[str, str]:
    """Return the columns of a section's table."""
    columns = {"shape": "<", "what": "<", "graph us": ".2f", "kernel us": ".2f", "of copy": ".3f"}
    columns |= dict.fromkeys(section.ratios, ".2f") | {"error": ".1e"}
    if section is not SECTIONS["study"]:
        columns["flips"] = ".4f"
    if section is SECTIONS["gate"]:
        columns |= {"dx error": ".1e", "dw error": ".1e"}
    return columns | {"compile s": ".1f", "check": "<", "note": "<"}


SUMMARY_COLUMNS = {
    **{"section": "<", "what": "<", "shapes": "d", "all peers": "d", "ratio": "<", "geomean": ".3f", "min": ".3f"},
    **{"wanted": "<", "reached": "<", "check": "<"},
}


def plot(path: str, rows: list[dict]) -> None:
    """Draw one panel of bars per section: microseconds by shape."""
    panels: dict[str, dict[str, dict]] = {}
    for row in rows:
        panel = panels.setdefault(f"{row['section']}: {SECTIONS[row['section']].title}", {})
        panel.setdefault(row["shape"], {})[row["what"]] = row.get("graph us")
    benchmarking.bar_plot(path, panels, "us a call")


# The command line


def pattern(text: str) -> Shape | str:
    """Parse a shape such as 64x256x7168; text with a star is a pattern of shapes."""
    if "*" in text:
        return text
    try:
        rows, columns, inner = map(int, text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a shape such as 64x256x7168 or *x256x7168") from None
    return Shape(rows, columns, inner)


def shapes_of(section: Section, args: argparse.Namespace) -> list[Shape]:
    """Return a section's shapes that match the options, and any shape the options give in numbers."""
    own = section.quick if args.quick else section.shapes
    if not args.shapes:
        return list(own)
    given = [item for item in args.shapes if isinstance(item, Shape)]
    patterns = [item for item in args.shapes if isinstance(item, str)]
    return given + [shape for shape in own if any(fnmatch.fnmatch(str(shape), each) for each in patterns)]


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ["router", "study", "gate"]
    parser.add_argument("--sections", type=names_in(SECTIONS), default=default, help=f"any of {','.join(SECTIONS)}")
    parser.add_argument("--shapes", nargs="+", type=pattern, help="MxNxK, or a pattern such as '*x256x7168'")
    parser.add_argument("--quick", action="store_true", help="a few shapes of each section")
    parser.add_argument("--tune-seconds", type=float, default=300, help="limit of Inductor's tuning; 0: no tuned peers")
    parser.add_argument("--processes", type=int, default=min(8, cpus() // 2), help="processes that tune ahead")
    parser.add_argument(
        "--custom-op-max-autotune",
        action="store_true",
        help="also tune the batched product of the custom op's winner, not only the number of splits",
    )
    parser.add_argument("--check", action="store_true", help="compare with fp64, without timing or tuning")
    parser.add_argument("--list", action="store_true", help="print sections and shapes, then exit")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="PNG")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.list:
        for name in args.sections:
            shapes = " ".join(map(str, shapes_of(SECTIONS[name], args)))
            print(f"{name}: {SECTIONS[name].title}\n    {shapes}")
        return 0
    args.device = "cuda" if torch.cuda.is_available() else "cpu"
    if not can_run("router.py", args):
        return 1
    args.options = Options(args.device, MAX_AUTOTUNE if args.custom_op_max_autotune else None)
    return run(args)


def run(args: argparse.Namespace) -> int:
    """Print and write the tables; return the exit status."""
    facts = benchmarking.machine(args.device)
    args.bandwidth = None if args.check else benchmarking.copy_bandwidth(benchmarking.bench_ms)
    print(benchmarking.describe(facts), flush=True)
    if args.bandwidth:
        facts["copy TB/s"] = args.bandwidth / 1e12
        print(f"copy {facts['copy TB/s']:.2f} TB/s", flush=True)

    work = [(name, shape) for name in args.sections for shape in shapes_of(SECTIONS[name], args)]
    budget = TuningTime(args.tune_seconds)
    if not args.check:
        # The dispatch section compiles for all M at once, and tunes while it compiles.
        budget.tune([Job(*each, args.options) for each in work if each[0] != "dispatch"], args.processes)
        facts["tuned ahead"] = f"{len(budget.ahead)} shapes in {args.tune_seconds - budget.left:.0f} s"
        print(f"tuned ahead: {facts['tuned ahead']}", flush=True)

    rows, group, printed = [], None, None
    for name, shape in work:
        section = SECTIONS[name]
        if name != printed:
            print(f"\n{name}: {section.title}")
            printed = name
        if group != (group := (name, section.group(shape))):
            # Dynamo stops compiling a function after a few shapes, so it starts afresh.
            torch._dynamo.reset()
        rows += (new := measure_shape(name, shape, args, budget))
        print(benchmarking.table(new, columns_of(section)), flush=True)
        summary = summarize(rows)
        # Written after every shape: an interrupted run keeps its results.
        if args.json:
            benchmarking.write_json(args.json, {**facts, "summary": summary, "rows": rows})
        if args.device == "cuda":
            torch.cuda.empty_cache()
    if args.plot:
        plot(args.plot, rows)
    print("\n" + benchmarking.table(summarize(rows), SUMMARY_COLUMNS))
    return 1 if any(row["ours"] and row["check"] != "ok" for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
