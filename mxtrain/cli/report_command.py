"""``mxtrain report``: a report of finished runs, comparisons and CSVs of results."""

import sys
from pathlib import Path


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "report",
        help="compare runs over seeds and learning rates, as HTML and Markdown",
        description="""\
Write report.html and report.md: mean and standard error of the final losses over seeds, differences to a baseline
paired by seed with their confidence intervals, loss against learning rate, spikes, tokens per second, memory, curves.

  mxtrain report outputs/my_comparison               a folder that 'mxtrain compare' made
  mxtrain report outputs/a outputs/b --baseline "mx_linear mxfp8" -o outputs/a_b
  mxtrain report scripts/evidence/llama3_125m.csv -o llama3_125m     rows that scripts/evidence/collect.py wrote

Runs are told apart by converter, learning rate and seed, which their folders hold. What cannot be read is one line.
""",
    )
    parser.set_defaults(run=_report)
    parser.add_argument(
        "sources",
        metavar="RUN",
        nargs="+",
        type=Path,
        help="folder of a run or a comparison, a folder that holds several of them, or a CSV of results",
    )
    parser.add_argument("--baseline", metavar="NAME", help="variant to compare with (default: the first one)")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FOLDER",
        type=Path,
        help="default: the comparison's folder, else 'report' in the current folder",
    )


def _report(options) -> int:
    print(write(options.sources, options.baseline, options.output))
    return 0


def write(sources: list[Path], baseline: str | None = None, output: Path | None = None) -> str:
    """Write the report of ``sources``, and return its tables and where it is. Notes go to stderr.

    Raises ConfigError if nothing can be compared, ``baseline`` is no variant, or the report cannot be written.
    """
    from mxtrain.analysis.comparison import compare
    from mxtrain.analysis.report import losses_table, report, write_report
    from mxtrain.analysis.results import read_sources
    from mxtrain.analysis.tables import aligned
    from mxtrain.run_folder.comparison import COMPARISON_FILE

    results, notes = read_sources(sources)
    for line in notes:
        print(f"mxtrain: not read: {line}", file=sys.stderr)
    groups = compare(results, baseline)
    for line in [line for group in groups for line in group.notes]:
        print(f"mxtrain: note: {line}", file=sys.stderr)
    is_comparison = len(sources) == 1 and (sources[0] / COMPARISON_FILE).is_file()
    folder = output or (sources[0] if is_comparison else Path("report"))
    title = ", ".join(dict.fromkeys(source.resolve().name for source in sources[:3])) + " ..." * (len(sources) > 3)
    markdown, page = write_report(folder, report(title, groups, notes))
    shown = [f"{group.title}, baseline {group.baseline}\n{aligned(losses_table(group))}" for group in groups]
    return "\n\n".join(shown) + f"\nreport: {page} and {markdown}"
