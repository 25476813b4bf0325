"""``mxtrain compare``: paired runs of several configs, one per GPU side by side, and a report."""

import argparse
import os
import shlex
import sys
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from mxtrain.cli.path_parser import PathParser, positive
from mxtrain.errors import ConfigError

DESCRIPTION = """\
Train variants with the same seeds, and report how their losses differ. Runs of one seed start from the same weights
and read the same text in the same order, so their difference says more than their losses.

  mxtrain compare llama3_125m_bf16 llama3_125m_mx_linear llama3_125m --seeds 3 --steps 4000
  mxtrain compare llama3_125m_mx_linear "p1=llama3_125m --mxnorm.p 1" "exact=llama3_125m --mxnorm.estimator exact"
  mxtrain compare llama3_125m_bf16 llama3_125m --lr 3e-4,1e-3,3e-3 --seeds 2 -o outputs/rates --dry-run
  mxtrain compare --resume outputs/rates

A VARIANT is a config or a preset, or in quotes '[NAME=]CONFIG FLAGS'. Variants come first; all flags that are not
listed below go to every run: --training.local_batch_size 16 --checkpoint.enable. The first variant is the baseline.

Every run is an 'mxtrain train' with a folder and a log of its own in the comparison's folder. A run that fails is
reported, and the others go on. Ctrl-C stops all of them, and the same command or --resume goes on: finished runs stay,
others resume from their checkpoints (with --checkpoint.enable) or start again. More seeds, rates and variants may come
to the same folder later. The report is drawn at the end; 'mxtrain report FOLDER' draws it again.

Exit status: 0 if all runs finished, 1 if one failed, 2 for a mistake in the settings, 128 + n after signal n.
"""


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "compare",
        help="train variants with the same seeds, and report the differences",
        description=DESCRIPTION,
        parents=[_options()],
        allow_abbrev=False,  # "--seed" is a mistake for "--debug.seed", and not "--seeds"
    )
    parser.usage = "mxtrain compare VARIANT... [options] [FLAGS]\n       mxtrain compare --resume FOLDER [options]"
    parser.set_defaults(run=_compare)
    # argparse does not know TorchTitan's flags, which may stand between the options.
    parser.add_argument("words", metavar="VARIANT", nargs=argparse.REMAINDER, help="config, or '[NAME=]CONFIG FLAGS'")


def _options() -> argparse.ArgumentParser:
    parser = PathParser("mxtrain compare", add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", metavar="N", type=positive, help="seeds 0 to N - 1 (default: 1)")
    parser.add_argument("--lr", metavar="A,B,...", default="", help="learning rates (default: that of each config)")
    parser.add_argument("--steps", metavar="N", type=positive, help="the same as --training.steps N")
    parser.add_argument(
        "--gpus", metavar="N", type=positive, help="GPUs (on a CPU: processes) of each run (default: as so far, or 1)"
    )
    fitting = "runs at a time (default: as many as there are GPUs for; CPU: 1)"
    parser.add_argument("--side-by-side", metavar="N", type=positive, help=fitting)
    parser.add_argument("--baseline", metavar="NAME", help="variant to compare with (default: the first one)")
    parser.add_argument("-o", "--output", metavar="FOLDER", type=Path, help="default: outputs/compare-TIME")
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="go on with the comparison in this folder")
    parser.add_argument("--dry-run", action="store_true", help="check the settings, print the runs, and train nothing")
    return parser


def separated(options) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the command's own options, the variants, and the flags for every run."""
    words = options.words
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    options, flags = _options().parse_known_args(words[count:], options)
    return options, words[:count], flags


def _compare(options) -> int:
    """Do the runs and write the report; see DESCRIPTION. Returns the exit status."""
    from mxtrain.cli.paired_runs import joined, read_all, unpaired_settings
    from mxtrain.run_folder.comparison import read_comparison

    options, variants, flags = separated(options)
    setting = "--output" if options.resume is None else "--resume"
    folder = options.resume or options.output or Path("outputs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    # A run whose folder was removed has not ended.
    earlier = {
        name: run if (folder / name).is_dir() else replace(run, status=None)
        for name, run in read_comparison(folder).items()
    }
    plan = _plan(options, variants, flags, earlier)
    # Another number may change the sequences per step, and with them what the runs that are left would train on.
    left = [run for run in earlier.values() if run.status != 0] or list(earlier.values())
    gpus = options.gpus or (left[-1].gpus if left else 1)
    runs = {
        name: run if run.status == 0 else replace(run, gpus=gpus)
        for name, run in joined(earlier, plan, f"{setting} = {str(folder)!r}").items()
    }
    names = dict.fromkeys(run.variant for run in runs.values())
    if options.baseline is not None and options.baseline not in names:
        raise ConfigError(f"--baseline {options.baseline!r} is not one of the variants: {', '.join(names)}")
    devices = _devices(gpus, options.side_by_side)
    # A dry run may plan runs for another machine.
    settings = read_all(runs, has_gpus=options.dry_run or devices[0] is not None)
    for line in unpaired_settings(runs, settings):
        print(f"mxtrain: note: {line}", file=sys.stderr)
    if options.dry_run:
        print(f"{len(runs)} runs in {folder}, {len(devices)} at a time")
        for run in runs.values():
            command = shlex.join(["mxtrain", "train", *run.arguments])
            print(f"{run.name}: {'finished' if run.status == 0 else command}")
        return 0
    from mxtrain.cli.side_by_side import SideBySide

    return _train(SideBySide(folder, runs, settings, devices, gpus), setting, options.baseline)


def _plan(options, variants: list[str], flags: list[str], earlier: dict) -> dict:
    """Return the runs that the command asks for, by name; ``earlier`` holds the runs of the folder so far."""
    from mxtrain.cli.paired_runs import planned, planned_again

    if options.resume is None:
        if not variants:
            raise ConfigError("VARIANT is missing: give configs, or --resume and the folder of a comparison")
        steps = [] if options.steps is None else [f"--training.steps={options.steps}"]
        return planned(variants, options.seeds or 1, _rates(options.lr), [*flags, *steps])
    if variants or flags or options.steps or options.lr or options.seeds or options.output:
        raise ConfigError(
            "--resume takes the variants, seeds and flags of the comparison, in its folder; allowed are "
            "--side-by-side, --gpus, --baseline and --dry-run. To add seeds, repeat the first command with --seeds"
        )
    if not earlier:
        raise ConfigError(f"--resume {options.resume}: no comparison has been here, comparison.json is missing")
    return planned_again(earlier)


def _train(side_by_side, setting: str, baseline: str | None) -> int:
    """Do the runs that are not finished, write the report, and return the exit status."""
    from mxtrain.cli import report_command
    from mxtrain.run_folder.comparison import write_comparison
    from mxtrain.run_folder.lock import locked

    folder, runs = side_by_side.folder, side_by_side.runs
    with locked(folder, setting) as warning:
        if warning:
            print(f"mxtrain: warning: {warning}", file=sys.stderr)
        write_comparison(folder, runs)
        print(f"mxtrain: {len(runs)} runs in {folder}, {len(side_by_side.devices)} at a time", flush=True)
        side_by_side.finish()
    try:
        print(report_command.write([folder], baseline, folder))
    except ConfigError as error:
        print(f"mxtrain: no report: {error}", file=sys.stderr)
    if failed := [run.name for run in runs.values() if run.status != 0]:
        print(f"mxtrain: {len(failed)} of {len(runs)} runs are not finished: {', '.join(failed)}", file=sys.stderr)
        print(f"mxtrain: go on with: mxtrain compare --resume {shlex.quote(str(folder))}", file=sys.stderr)
    if side_by_side.stopped_by is not None:
        return 128 + side_by_side.stopped_by
    return 1 if failed else 0


def _rates(text: str) -> list[str]:
    """Return the learning rates as their shortest exact texts. Raises ConfigError for what is not a positive number."""
    rates = []
    for word in filter(None, text.split(",")):
        try:
            rate = float(word)
        except ValueError:
            rate = 0.0
        if not 0 < rate < float("inf"):
            raise ConfigError(f"--lr {text}: {word!r} is not a positive number")
        rates.append(repr(rate))
    return list(dict.fromkeys(rates))


def _devices(gpus: int, side_by_side: int | None) -> list[str | None]:
    """Return the GPUs of each run that goes on at a time; None on a CPU.

    Raises ConfigError if there are too few GPUs.
    """
    from mxtrain.cli.launch import accelerator_count

    count = accelerator_count()
    if count == 0:
        return [None] * (side_by_side or 1)
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(count)]
    places = side_by_side or count // gpus
    if places < 1 or places * gpus > count:
        asked = f"--side-by-side {side_by_side} of " if side_by_side else ""
        raise ConfigError(f"{asked}--gpus {gpus}: PyTorch sees {count} GPUs, which are too few")
    return [",".join(names[place * gpus : (place + 1) * gpus]) for place in range(places)]
