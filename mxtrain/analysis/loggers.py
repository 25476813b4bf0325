"""Takes TorchTitan's metrics of every logged step: into ``metrics.jsonl``, onto the terminal, and to wandb.

``run.json`` keeps the id of the wandb run. A resumed run starts wandb with WANDB_RUN_ID and WANDB_RESUME = "allow", so
that a server appends to the run. Offline, every start makes a local folder with the same id, and ``wandb sync`` of all
of them uploads one run (wandb 0.31). wandb's history only grows, so steps that wandb has are not sent again.
"""

import glob
import logging
import math
import os
import re
import shlex
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

from mxtrain.analysis.metrics_file import NUMERICS, MetricsWriter, read_metrics
from mxtrain.analysis.runs import variant_of
from mxtrain.checkpoints.run_folder import FACTS_FILE, METRICS_FILE
from mxtrain.checkpoints.terminal import show_line
from mxtrain.errors import one_line
from mxtrain.files import read_json, reason

logger = logging.getLogger()  # TorchTitan's

# Key in a row of metrics.jsonl -> name of the same number in TorchTitan 0.2.2.
TRAINING_KEYS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_second": "throughput(tps)",
    "tflops": "tflops",
    "mfu": "mfu(%)",
    "memory_gib": "memory/max_reserved(GiB)",
    "tokens_seen": "n_tokens_seen",
}
LOSS, VALIDATION_LOSS = TRAINING_KEYS["loss"], "validation_metrics/loss"
# Beginning of the names of figures of a linear's casts. All casts share a curve.
_CAST = re.compile(r"^(fprop|dgrad|wgrad)_(input|weight|grad)_")
LOW_IS_BAD = ("_sqnr_db", "_min", "_min_exponent", "_r2", "_agreement", "_to_noise")
"""Ends of the names of figures whose least value is the worst"""


def overview(metrics: dict) -> dict:
    """Return metrics with the worst value over all modules in the place of every module's figures, about 20 values.

    "numerics/worst/cast_sqnr_db" is the least SQNR among all casts of all modules. NaN is worse than any number.
    """
    shown = {}
    for key, value in metrics.items():
        if key.startswith(NUMERICS):
            figure = _CAST.sub("cast_", key.rpartition("/")[2]).removesuffix("_worst_expert")
            key = f"{NUMERICS}worst/{figure}"
            value = max(shown.get(key, value), value, key=partial(_badness, figure))
        shown[key] = value
    return shown


def _badness(figure: str, value: float) -> float:
    """A number that is larger for worse values of a figure."""
    if math.isnan(value):
        return math.inf
    if figure == "rms_ratio_mean":
        return abs(value - 1)
    return -value if figure.endswith(LOW_IS_BAD) else value


class MetricsFileLogger:
    """Writes metrics to ``metrics.jsonl``, in the format of ``mxtrain.analysis.metrics_file``.

    While the file cannot be written, for example on a full disk, training goes on and rows wait in memory.
    """

    def __init__(self, path: Path, steps_done: int = 0):
        self.writer = MetricsWriter(path, steps_done)
        self.is_failing = False

    def log(self, metrics: dict, step: int) -> None:
        keys = {"validation_loss": VALIDATION_LOSS} if VALIDATION_LOSS in metrics else TRAINING_KEYS
        row = {"step": step}
        row.update({key: float(metrics[source]) for key, source in keys.items() if source in metrics})
        row.update({key: value for key, value in metrics.items() if key.startswith(NUMERICS)})
        if "tokens_seen" in row:
            row["tokens_seen"] = int(row["tokens_seen"])
        self._write(row)

    def log_event(self, step: int, text: str) -> None:
        self._write({"step": step, "event": text})

    def _write(self, row: dict) -> None:
        row["time"] = time.time()
        try:
            self.writer.write(row)
        except OSError as error:
            if not self.is_failing:
                logger.warning(
                    f"step {row['step']}: {self.writer.path} cannot be written: {reason(error)}; training goes on, and "
                    "the rows are kept until they can be written"
                )
            self.is_failing = True

    def close(self) -> None:
        try:
            self.writer.flush()
        except OSError as error:
            logger.warning(f"{self.writer.path} cannot be written: {reason(error)}; the last rows are lost")


class ProgressLogger:
    """Shows every logged step on the terminal, and every validation loss in a line that stays."""

    def __init__(self, steps: int, processes: int):
        self.steps = steps
        self.each = "" if processes == 1 else " per device"
        self.first: tuple[int, float] | None = None  # the first logged step of this process, and its time

    def log(self, metrics: dict, step: int) -> None:
        now = time.perf_counter()
        place = f"step {step:{len(str(self.steps))}}/{self.steps}"
        if VALIDATION_LOSS in metrics:
            show_line(f"{place}  validation loss {metrics[VALIDATION_LOSS]:.4f}")
        if VALIDATION_LOSS in metrics or LOSS not in metrics:
            return
        row = {key: float(metrics[source]) for key, source in TRAINING_KEYS.items() if source in metrics}
        words = [place, f"loss {row['loss']:.4f}"]
        if "grad_norm" in row:
            words.append(f"grad norm {row['grad_norm']:.3g}")
        words.append(f"{row['tokens_per_second']:,.0f} tokens/s{self.each}")
        if self.first is None:
            self.first = step, now
        elif step < self.steps:
            # At the mean speed since the first logged step, whose own time is mostly warm-up.
            first_step, first_time = self.first
            left = (self.steps - step) * (now - first_time) / (step - first_step)
            words.append(f"{timedelta(seconds=round(left))} left")
        if "mfu" in row:  # the device's peak is known
            words += [f"{row['tflops']:,.4g} TFLOP/s{self.each}", f"MFU {row['mfu']:.1f} %"]
        show_line("  ".join(words))

    def close(self) -> None:
        pass


WANDB_DEFAULTS = {
    "WANDB_INIT_TIMEOUT": "30",
    "WANDB_FINISH_TIMEOUT": "120",
    "WANDB_FINISH_TIMEOUT_RAISES": "true",
    "WANDB_SILENT": "true",
    "WANDB_PROJECT": "mxtrain",
}
"""
Values of wandb's variables where the user has set none. Timeouts are in seconds: after the first, the run goes on
without wandb; after the second, the upload at the end stops. wandb is silent because the summary says where the run is
"""
USERS_CHOICES = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
"""Variables by which the user decides which wandb run continues"""


def earlier_wandb_run(folder: Path) -> tuple[str, int] | None:
    """Return the id of the wandb run of the run in ``folder``, and the last logged step.

    None if it has no wandb run, or none whose files can be read.
    """
    try:
        run_id = read_json(folder / FACTS_FILE)["wandb"]["id"]
        last_step = max(row["step"] for row in read_metrics(folder / METRICS_FILE))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return (run_id, last_step) if run_id else None


class WandbLogger:
    """Logs TorchTitan's metrics by TorchTitan's logger for wandb. A failure of wandb after the start is one warning.

    TorchTitan and wandb read names, id and more from the environment, where the user's values stand.
    """

    def __init__(self, start: Callable, job: dict, facts: dict, earlier: tuple[str, int] | None = None):
        """Start wandb by ``start``, which makes TorchTitan's logger; offline without a key. Raises what wandb raises.

        The run of ``earlier_wandb_run`` goes on, unless the user has chosen another one.
        """
        import wandb

        if any(os.environ.get(name) for name in USERS_CHOICES):
            earlier = None
        run_id, self.last_step = earlier or (None, 0)
        self.has_failed = False
        with patch.dict(os.environ, wandb_variables(job, facts, run_id)):
            os.environ.pop("WANDB_RUN_TAGS", None)  # a text, which TorchTitan hands on as a list: a tag per letter
            # The variable comes too late: wandb reads the environment once per process.
            if wandb.setup().settings.mode == "online" and not wandb.login(verify=False, prompt=False):
                wandb.setup(settings=wandb.Settings(mode="offline"))
            self.logger = start()
        self.run = wandb.run
        if self.run.resumed:
            self.last_step = self.run.starting_step - 1  # a server knows which steps have reached it
        # The sections of the job config keep their names.
        self.run.config.update({key: value for key, value in facts.items() if key not in job}, allow_val_change=True)

    def log(self, metrics: dict, step: int) -> None:
        """Log an overview of the figures of diagnostics, and a table of all of them; other metrics as they are."""
        if step > self.last_step:
            self._try(lambda: self.logger.log(overview(metrics) | _table(metrics), step))

    def log_event(self, step: int, text: str) -> None:
        """Log a text with a step, in the column "event"; the run's summary keeps the last one."""
        if step > self.last_step:
            self._try(lambda: self.logger.log({"event": text}, step))

    def close(self) -> None:
        self._try(self.logger.close)

    def _try(self, action: Callable) -> None:
        try:
            action()
        except Exception as error:  # TimeoutError if the server does not take everything in time
            if not self.has_failed:
                logger.warning(f"wandb failed: {one_line(error)}; training goes on, and writes metrics.jsonl")
            self.has_failed = True


def _table(metrics: dict) -> dict:
    import wandb

    figures = [[*key.split("/")[1:], value] for key, value in metrics.items() if key.startswith(NUMERICS)]
    return {f"{NUMERICS}all": wandb.Table(["module", "figure", "value"], figures)} if figures else {}


def wandb_variables(job: dict, facts: dict, run_id: str | None) -> dict[str, str]:
    """Return the environment variables by which TorchTitan and wandb name the run.

    Each comes from the first of these that says something: the section [metrics], the environment, the run's own facts.
    A run that continues, with ``run_id``, keeps the name that it has on the server, where a user may have changed it.
    Without mxtrain's config module, [metrics] has no settings of wandb.
    """
    env, metrics = os.environ.get, job["metrics"]
    tags = metrics.get("wandb_tags")
    found = {name: env(name, value) for name, value in WANDB_DEFAULTS.items()}
    if run_id:
        found |= {"WANDB_RUN_ID": run_id, "WANDB_RESUME": "allow"}
    elif not env("WANDB_RUN_NAME"):
        sizes = [f"{name}={value}" for name, value in facts.get("model_args", {}).items()]
        seed = [f"seed {seed}"] if (seed := job.get("debug", {}).get("seed")) is not None else []
        found["WANDB_RUN_NAME"] = " ".join([facts["model"], facts["flavor"], *sizes, variant_of(facts), *seed])
    given = {"PROJECT": "project", "RUN_NAME": "name", "RUN_GROUP": "group"}
    found |= {f"WANDB_{name}": metrics[f"wandb_{key}"] for name, key in given.items() if metrics.get(f"wandb_{key}")}
    words = env("WANDB_RUN_TAGS") if tags is None else ",".join(tags)
    return found | ({"WANDB_TAGS": words} if words else {})


def sync_command(folder: Path, run_id: str) -> str:
    """Return the command that uploads all local folders of a wandb run, in their order."""
    found = folder.glob(f"**/offline-run-*/run-{glob.escape(run_id)}.wandb")
    # A name begins with the second of a start, and two starts within a second differ at the end.
    places = sorted((file.resolve().parent for file in found), key=lambda place: (place.name, place))
    return shlex.join(["wandb", "sync", *map(str, places)])


def wandb_facts(run, folder: Path) -> dict:
    """Return the ``mode`` (online, offline or disabled), ``id``, ``dir``, ``url`` and ``sync`` command of a wandb.Run.

    ``folder`` is that of the training run, where the folders of all starts are.
    """
    if run is None or run.disabled:
        return {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}
    place = Path(run.dir).resolve().parent
    facts = {"mode": "offline" if run.offline else "online", "id": run.id, "dir": str(place), "url": None, "sync": None}
    return facts | ({"sync": sync_command(folder, run.id)} if run.offline else {"url": run.url})
