"""``mxtrain compare``: paired runs of several configs, and a table and a figure of their differences."""

import argparse
import json
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from mxtrain.checkpoints.run_folder import CONFIG_FILE, FACTS_FILE, locked
from mxtrain.cli.console import PathParser, positive
from mxtrain.errors import ConfigError, errors_begin_with
from mxtrain.files import os_errors_as, read_json, read_toml, reason, replace_file
from mxtrain.launched import COMPARISON_VARIABLE, import_flags

if TYPE_CHECKING:
    from mxtrain.settings.fields import Settings

DESCRIPTION = """\
Train variants with the same seeds, and show how their losses differ. Runs of one seed start from the same weights
and read the same text in the same order.

  mxtrain compare llama3_125m_bf16 llama3_125m_mx_linear llama3_125m --seeds 3 --steps 4000
  mxtrain compare llama3_125m_mx_linear "p1=llama3_125m --mxnorm.p 1" "exact=llama3_125m --mxnorm.estimator exact"
  mxtrain compare --from scripts/evidence/llama3_1b.csv -o outputs/llama3_1b

A VARIANT is a config or a preset, or in quotes '[NAME=]CONFIG FLAGS'. Variants come first; all flags that are not
listed below go to every run: --training.local_batch_size 16 --checkpoint.enable. The first variant is the baseline.

A run that fails is reported, and the others go on. Ctrl-C stops all of them. The same command with -o FOLDER goes on:
finished runs stay, others resume from their checkpoints (with --checkpoint.enable; remove run folders without a
checkpoint). More seeds, rates and variants may come to the same folder. At the end, the folder gets a table,
comparison.md, and a figure, differences.svg.

Exit status: 0 if all runs finished, 1 if one failed, 2 for a mistake in the settings, 130 after Ctrl-C.
"""
TRAIN = [sys.executable, *import_flags(), "-m", "mxtrain.cli", "train"]
COMPARISON_FILE, TABLE_FILE = "comparison.json", "comparison.md"


def add(commands) -> None:
    parser = commands.add_parser(
        "compare",
        help="train variants with the same seeds, and show how their losses differ",
        description=DESCRIPTION,
        parents=[_options()],
        allow_abbrev=False,  # "--seed" is a mistake for "--debug.seed", and not "--seeds"
    )
    parser.usage = "mxtrain compare VARIANT... [options] [FLAGS]\n       mxtrain compare --from CSV [options]"
    parser.set_defaults(run=_compare)
    # argparse does not know TorchTitan's flags, which may stand between the options.
    parser.add_argument("words", metavar="VARIANT", nargs=argparse.REMAINDER, help="a config, or '[NAME=]CONFIG FLAGS'")


def _options() -> argparse.ArgumentParser:
    parser = PathParser("mxtrain compare", add_help=False, allow_abbrev=False)
    parser.add_argument("--seeds", metavar="N", type=positive, default=1, help="use seeds 0 to N - 1 (default: 1)")
    rates = "train with these learning rates (default: the rate of each config)"
    parser.add_argument("--lr", metavar="A,B,...", type=_rates, default=[], help=rates)
    parser.add_argument("--steps", metavar="N", type=positive, help="the same as --training.steps N")
    sharing = "GPUs of each run (on a CPU: processes); runs that fit beside one another train at once (default: 1)"
    parser.add_argument("--devices", metavar="N", type=positive, default=1, help=sharing)
    parser.add_argument("--baseline", metavar="NAME", help="variant to compare with (default: the first one)")
    parser.add_argument("--from", metavar="CSV", type=Path, dest="table", help="compare rows of CSV; train nothing")
    parser.add_argument("-o", "--output", metavar="FOLDER", type=Path, help="folder (default: outputs/compare-TIME)")
    parser.add_argument("--dry-run", action="store_true", help="check the settings, print the runs, and train nothing")
    return parser


def _rates(text: str) -> list[str]:
    """Return the learning rates as their shortest exact texts; the type of an option."""
    try:
        return list(dict.fromkeys(repr(float(word)) for word in text.split(",")))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text} is not a list of numbers such as 3e-4,1e-3") from None


def separated(options) -> tuple[argparse.Namespace, list[str], list[str]]:
    """Return the command's own options, the variants, and the flags for every run."""
    words = options.words
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    options, flags = _options().parse_known_args(words[count:], options)
    return options, words[:count], flags


def _compare(options) -> int:
    from mxtrain.analysis.comparison import read_results, row_of
    from mxtrain.analysis.runs import load_run

    options, variants, flags = separated(options)
    folder = options.output or Path("outputs") / f"compare-{datetime.now():%Y%m%d-%H%M%S}"
    if options.table is not None:
        if variants or flags:
            raise ConfigError(f"--from {options.table} trains nothing; leave out {' '.join([*variants, *flags])}")
        show(read_results(options.table), [], folder, options.baseline)
        return 0
    if not variants:
        raise ConfigError("VARIANT is missing; name configs, or write --from and a CSV of results")
    steps = [] if options.steps is None else [f"--training.steps={options.steps}"]
    runs = planned(variants, options.seeds, options.lr, [*flags, *steps])
    names = dict.fromkeys(run.variant for run in runs.values())
    if options.baseline is not None and options.baseline not in names:
        raise ConfigError(f"--baseline {options.baseline!r} is not one of the variants: {', '.join(names)}")
    # A dry run may plan runs for another machine.
    shares = [""] if options.dry_run else device_shares(options.devices)
    settings = read_all(runs, options.devices, has_gpus=shares[0] is not None)
    finished = finished_runs(folder)
    for name in finished & set(runs):
        require_same_settings(folder / name, settings[name])
    at_a_time = "" if options.dry_run else f", {len(shares)} at a time"
    print(f"mxtrain: {len(runs)} runs in {folder}{at_a_time}", flush=True)
    if options.dry_run:
        for name, run in runs.items():
            print(f"{name}: {'finished' if name in finished else shlex.join(['mxtrain', 'train', *run.arguments])}")
        return 0
    with locked(folder, "--output") as warning:
        if warning:
            print(f"mxtrain: warning: {warning}", file=sys.stderr)
        is_stopped = train_all(folder, runs, shares, options.devices, finished)
    rows, notes = [], []
    for name, run in runs.items():
        try:
            rows.append(row_of(load_run(folder / name), run.variant))
        except ConfigError as error:
            notes.append(f"{name}: not read: {error}")
    try:
        show(rows, notes, folder, options.baseline, list(names))
    except ConfigError as error:
        print(f"mxtrain: no comparison: {error}", file=sys.stderr)
    if left := [name for name in runs if name not in finished]:
        print(f"mxtrain: {len(left)} of {len(runs)} runs are not finished: {', '.join(left)}", file=sys.stderr)
        again = f"the same command with -o {shlex.quote(str(folder))} goes on"
        print(f"mxtrain: remove run folders without a checkpoint, and {again}", file=sys.stderr)
    return 130 if is_stopped else 1 if left else 0


class Run(NamedTuple):
    variant: str
    """Runs of one variant differ in seed and learning rate only"""
    arguments: list[str]
    """Config and flags of 'mxtrain train', without the folder"""


def variant_of(words: str) -> tuple[str, str, list[str]]:
    """Return name, config and flags of ``[NAME=]CONFIG [FLAGS]``, which is one word of the command line.

    Without NAME, the name is that of the config file, followed by the flags.
    """
    try:
        first, *flags = shlex.split(words) or [""]
    except ValueError as error:
        raise ConfigError(f"VARIANT = {words!r} cannot be split into words: {error}; check its quotes") from error
    name, equals, config = first.partition("=")
    if not equals or not re.fullmatch(r"[\w.+-]+", name) or Path(first).is_file():
        name, config = "", first
    if not config or config.startswith("-"):
        raise ConfigError(f"VARIANT = {words!r} names no config; write CONFIG, or '[NAME=]CONFIG FLAGS' in quotes")
    path = Path(config)
    stem = path.resolve().parent.name if path.name == CONFIG_FILE else path.stem  # a run's folder holds config.toml
    return name or re.sub(r"[^\w.+-]+", "-", "-".join([stem, *(flag.lstrip("-") for flag in flags)])), config, flags


def planned(variants: list[str], seeds: int, rates: list[str], flags: list[str]) -> dict[str, Run]:
    """Return the runs by name, seed after seed: after the first ones, every variant has a result.

    Without ``rates``, runs have the rates of their configs. The flags of a variant override ``flags``.
    """
    found = [variant_of(words) for words in variants]
    own = ["job.dump_folder", "job.config_file", "debug.seed", *["optimizer.lr"] * bool(rates)]
    for flag in [flag.partition("=")[0] for flag in (*flags, *(flag for _, _, more in found for flag in more))]:
        if flag.removeprefix("--").replace("-", "_") in own:
            raise ConfigError(f"{flag} is set by 'mxtrain compare' for every run; leave it out")
    runs = {}
    for seed, rate, (variant, config, more) in product(range(seeds), rates or [""], found):
        name = f"{variant}{f'-lr{rate}' if rate else ''}-seed{seed}"
        if name in runs:
            raise ConfigError(f"two runs have the name {name!r}; write NAME=CONFIG to give variants other names")
        last = [f"--optimizer.lr={rate}"] * bool(rate) + [f"--debug.seed={seed}"]
        runs[name] = Run(variant, [config, *flags, *more, *last])
    return runs


def device_shares(devices: int) -> list[str | None]:
    """Cut the machine into shares of ``devices`` GPUs: values of CUDA_VISIBLE_DEVICES; one None on a CPU."""
    from mxtrain.cli.launch import accelerator_count

    count = accelerator_count()
    if count == 0:
        return [None]
    if devices > count:
        raise ConfigError(f"--devices {devices} is too many for the GPUs of this machine; allowed is 1 to {count}")
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    names = visible or [str(number) for number in range(count)]
    return [",".join(names[first : first + devices]) for first in range(0, count - devices + 1, devices)]


def read_all(runs: Mapping[str, Run], processes: int = 1, has_gpus: bool = True) -> "dict[str, Settings]":
    from mxtrain.settings.machine import Machine
    from mxtrain.settings.read import places, read_settings
    from mxtrain.titan.job_config import check_job  # takes seconds

    found, checked = {}, set()
    for name, run in runs.items():
        config, *flags = run.arguments
        arguments = [f"--job.config_file={config}", *flags]
        with errors_begin_with(f"{name}: "), places(arguments):
            found[name] = read_settings(arguments)
            if run.variant not in checked:
                check_job(found[name], Machine(processes, has_gpus))
                checked.add(run.variant)
    return found


def finished_runs(folder: Path) -> set[str]:
    """Return the names of the runs in ``folder`` that have ended with status 0."""
    try:
        ended = [row["name"] for row in read_json(folder / COMPARISON_FILE, kind=list) if row["status"] == 0]
    except FileNotFoundError:
        return set()
    return {name for name in ended if (folder / name / CONFIG_FILE).is_file()}


def require_same_settings(folder: Path, settings: "Settings") -> None:
    """Raise ConfigError if the finished run in ``folder`` had other settings that change what is trained."""
    from mxtrain.settings.resume import settings_before, with_own_rounding
    from mxtrain.settings.types import Resume

    before = settings_before(read_toml(folder / CONFIG_FILE), settings.known)
    if (facts := folder / FACTS_FILE).exists():
        before = with_own_rounding(before, read_json(facts).get("versions") or {})
    for name, field in settings.known.items():
        if field.resume is not Resume.FREE and before[name] != settings[name]:
            raise ConfigError(
                f"{name} = {settings[name]!r}, but the run in {folder} has {before[name]!r}; choose another --output"
            )


def train_all(folder: Path, runs: dict[str, Run], shares: list[str | None], processes: int, finished: set[str]) -> bool:
    """Do the runs that are not in ``finished``, one at a time on each share of the machine, and add them to it.

    A run that fails is reported, and the others go on. Returns whether Ctrl-C has stopped them.
    """
    free, lock = list(shares), threading.Lock()

    def work(name: str) -> None:
        share, begin, log = free.pop(0), time.monotonic(), folder / f"{name}.log"
        _say(f"{name}: starts{'' if share is None else f' on GPU {share}'}, log in {log}")
        try:
            status = _train(runs[name], folder / name, log, share, len(shares), processes)
            how = f"after {(time.monotonic() - begin) / 60:.1f} min"
            if status == 0:
                with lock:
                    finished.add(name)
                    rows = [{"name": one, "status": 0} for one in sorted(finished)]
                    replace_file(folder / COMPARISON_FILE, json.dumps(rows, indent=1).encode())
                _say(f"{name}: finished {how}; {len(finished & set(runs))} of {len(runs)}")
            else:
                last = log.read_text(errors="replace").strip().rpartition("\n")[2]
                _say(f"{name}: FAILED {how} with exit status {status}: {last}")
        except OSError as error:
            _say(f"{name}: FAILED: {error.filename}: {reason(error)}")
        finally:
            free.append(share)

    with ThreadPoolExecutor(len(shares)) as threads:
        try:
            list(threads.map(work, [name for name in runs if name not in finished]))
        except KeyboardInterrupt:  # the terminal has sent the signal to the runs, too: they save and stop
            return True
    return False


def _train(run: Run, folder: Path, log: Path, share: str | None, shares: int, processes: int) -> int:
    """Do a run in a process of its own, and return its exit status."""
    environment = {**os.environ, COMPARISON_VARIABLE: str(os.getpid()), "NGPU": str(processes)}
    if share is not None:
        cores = len(os.sched_getaffinity(0)) // (shares * processes)
        environment = {"OMP_NUM_THREADS": str(max(1, cores)), **environment, "CUDA_VISIBLE_DEVICES": share}
    command = [*TRAIN, *run.arguments, f"--job.dump_folder={folder}"]
    with open(log, "ab") as output:
        # subprocess.run would kill the run a moment after Ctrl-C.
        return subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
        ).wait()


def _say(text: str) -> None:
    print(f"mxtrain: {text}\n", end="", flush=True)


def show(rows: list[dict], notes: list[str], folder: Path, baseline: str | None, variants: Sequence[str] = ()) -> None:
    """Print the tables of ``rows`` with ``notes``, and write them and the figures into ``folder``."""
    from mxtrain.analysis.comparison import compare
    from mxtrain.analysis.comparison_figures import differences_svg, markdown

    groups, parts, figures = compare(rows, baseline, variants), [], []
    with os_errors_as(f"the comparison in {str(folder)!r} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        for figure in folder.glob("differences*.svg"):  # of an earlier comparison
            figure.unlink()
        for number, group in enumerate(groups, start=1):
            parts += [f"{group.title}, baseline {group.baseline}", markdown(group)]
            notes = [*notes, *group.notes]
            if svg := differences_svg(group):
                name = "differences.svg" if len(groups) == 1 else f"differences_{number}.svg"
                replace_file(folder / name, svg.encode())
                figures.append(name)
        text = "\n\n".join([*parts, *["\n".join(f"- {line}" for line in notes)] * bool(notes)])
        replace_file(folder / TABLE_FILE, f"{text}\n".encode())
    print(f"{text}\nmxtrain: {', '.join([TABLE_FILE, *figures])} in {folder}")
