"""``mxtrain plot``: the loss curves of runs in one picture, and a table; with --numerics the figures of one run."""

import sys
from pathlib import Path

from mxtrain.cli.console import positive
from mxtrain.errors import ConfigError


def add(commands) -> None:
    parser = commands.add_parser(
        "plot",
        help="draw the loss curves of runs and compare the runs in a table",
        description="""\
Draw the loss curves of one or more runs in one file. Print a table with the last loss, the mean loss of the last 10 %
of the steps, tokens per second per device, and peak memory. A folder that cannot be read is one line on stderr.

  mxtrain plot outputs/a outputs/b -o comparison.png
  mxtrain plot outputs/p1 outputs/p2 --baseline outputs/bf16     a second panel: losses minus those of bf16
  mxtrain plot outputs/a --smooth 20 --x tokens

With --numerics, draw the diagnostics of one run with mxnorm.diagnostics.every > 0, and print its worst modules.

  mxtrain plot --numerics outputs/a -o numerics.pdf
""",
    )
    parser.set_defaults(run=_plot)
    parser.add_argument("runs", metavar="RUN", nargs="+", help="folder of a run, with metrics.jsonl")
    output = "PNG, SVG or PDF (default: loss.png or numerics.png; of one run, in its folder)"
    parser.add_argument("-o", "--output", metavar="FILE", type=Path, help=output)
    parser.add_argument("--baseline", metavar="RUN", help="folder of the run to compare with, in a second panel")
    smooth = "mean of N logged steps, an even N as N + 1; 1: none (default: about 4 %% of curves of 50 steps or more)"
    parser.add_argument("--smooth", metavar="N", type=positive, help=smooth)
    parser.add_argument("--numerics", action="store_true", help="draw the figures of diagnostics")
    axis = "the x-axis (default: step); time includes validation and the pauses of a resumed run"
    parser.add_argument("--x", choices=("step", "tokens", "time"), default="step", help=axis)


def _plot(options) -> int:
    """Draw the runs. One that cannot be drawn is a line on stderr, unless it is the only one or the baseline."""
    if options.numerics:
        return _plot_numerics(options)
    from mxtrain.analysis.plots import curves, plot
    from mxtrain.analysis.runs import load_run
    from mxtrain.analysis.tables import table
    from mxtrain.checkpoints.run_folder import PICTURE_FILE

    runs = []
    of_baseline = [] if options.baseline is None else [options.baseline]
    others = [f for f in options.runs if Path(f).resolve() not in [Path(one).resolve() for one in of_baseline]]
    for folder in [*of_baseline, *others]:
        try:
            run = load_run(folder)
            curves(run, options.x)
            runs.append(run)
        except ConfigError as error:
            if folder in of_baseline or len(options.runs) == 1:
                raise
            print(f"mxtrain: not drawn: {error}", file=sys.stderr)
    if not runs:
        raise ConfigError(f"none of the {len(options.runs)} folders holds a run that can be drawn")
    for run in runs:
        if run.problem:
            print(f"mxtrain: note: {run.name}: {run.problem}", file=sys.stderr)
    path = options.output or (runs[0].folder / PICTURE_FILE if len(runs) == 1 else Path(PICTURE_FILE))
    plot(runs, path, bool(of_baseline), options.smooth, options.x)
    print(table(runs), f"loss curves: {path}", sep="\n")
    return 0


def _plot_numerics(options) -> int:
    from mxtrain.analysis.numerics import draw_numerics
    from mxtrain.analysis.runs import load_run
    from mxtrain.checkpoints.run_folder import NUMERICS_FILE

    if len(options.runs) > 1 or options.baseline or options.smooth or options.x != "step":
        raise ConfigError("--numerics draws one RUN, over steps: allowed beside it is -o FILE")
    run = load_run(options.runs[0])
    path, worst = draw_numerics(run, options.output or run.folder / NUMERICS_FILE)
    print(worst, f"numerics: {path}", sep="\n")
    return 0
