"""How long a training stands still while a checkpoint is saved, by ``checkpoint.async_mode``.

    python scripts/bench/checkpoint.py train_configs/llama3_8b.toml
    python scripts/bench/checkpoint.py train_configs/llama3_debug.toml --modes disabled async

Each mode is a run of ``mxtrain train``, with all flags after "--". The stall of a save is the time between the logged
steps around it, minus the median of the other steps that no save overlaps. "complete" is the time from that step until
the checkpoint has its name. The run is killed when all measured saves have theirs, because it would end with a save
that is never asynchronous.
"""

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

MODES = ("disabled", "async", "async_with_pinned_mem")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--interval", type=int, default=8, help="steps between two saves")
    parser.add_argument("--saves", type=int, default=2, help="saves that are measured")
    parser.add_argument("--folder", type=Path, help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--json", type=Path, help="also write all numbers to this file")
    words = sys.argv[1:] if arguments is None else arguments
    end = words.index("--") if "--" in words else len(words)
    options = parser.parse_args(words[:end], argparse.Namespace(flags=words[end + 1 :]))
    results = []
    for mode in options.modes:
        folder = Path(tempfile.mkdtemp(prefix="mxtrain-", dir=options.folder))
        try:
            results += measure(mode, folder, options)
        finally:
            shutil.rmtree(folder)
    print(f"{'mode':24}{'save':>5}{'GB':>8}{'step s':>9}{'stall s':>9}{'complete s':>12}")
    for r in results:
        complete = f"{r['complete']:.1f}" if r["complete"] is not None else "-"
        print(f"{r['mode']:24}{r['save']:5}{r['gb']:8.1f}{r['step']:9.3f}{r['stall']:9.2f}{complete:>12}")
    if options.json:
        options.json.write_text(json.dumps(results, indent=1))


def measure(mode: str, folder: Path, options) -> list[dict]:
    interval, saves = options.interval, options.saves
    command = [sys.executable, "-m", "mxtrain.cli", "train", options.config, "--job.dump_folder", str(folder / "run")]
    settings = {
        "training.steps": interval * (saves + 1),
        "checkpoint.interval": interval,
        "checkpoint.keep_latest_k": 2,
        "checkpoint.async_mode": mode,
        "metrics.log_freq": 1,
    }
    flags = [f"--{name}={value}" for name, value in settings.items()]
    run = subprocess.Popen([*command, "--checkpoint.enable", *flags, *options.flags])
    metrics = folder / "run" / "metrics.jsonl"
    named = watch(run, folder / "run" / "checkpoint", metrics, last=interval * saves)
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    times = {row["step"]: row["time"] for row in rows if "loss" in row}
    lengths = {step: times[step] - times[step - 1] for step in times if step - 1 in times}
    # The first steps compile, and those after a save may share the machine with it.
    plain = [lengths[step] for step in lengths if 3 <= step <= interval]
    step_time = statistics.median(plain)
    size = sum(f.stat().st_size for f in (folder / "run" / "checkpoint").glob(f"step-{interval * saves}/*"))
    return [
        {
            "mode": mode,
            "save": save,
            "gb": size / 1e9,
            "step": step_time,
            "stall": lengths[step + 1] - step_time,
            "complete": named[f"step-{step}"] - times[step] if f"step-{step}" in named else None,
            "steps": lengths,
        }
        for save, step in ((n, n * interval) for n in range(1, saves + 1))
    ]


def watch(run: subprocess.Popen, checkpoints: Path, metrics: Path, last: int) -> dict[str, float]:
    """Note when checkpoints appear. Kill the run, and its workers with it, when step ``last`` is saved and logged."""
    times: dict[str, float] = {}
    while run.poll() is None:
        time.sleep(0.05)
        for path in checkpoints.glob("step-*"):
            times.setdefault(path.name, time.time())
        if f"step-{last}" in times and f'"step": {last + 1},' in metrics.read_text():
            run.kill()
            run.wait()
            return times
    raise RuntimeError(f"the run ended before it had saved and gone on from step {last}: exit status {run.returncode}")


if __name__ == "__main__":
    main()
