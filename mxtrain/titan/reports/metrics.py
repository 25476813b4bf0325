"""Write ``metrics.jsonl`` and ``run.json``, show progress, and log to wandb.

``build_metrics_processor`` returns TorchTitan's ``MetricsProcessor``, which computes loss, throughput and memory.
``metrics.jsonl`` and the progress line are two more of its loggers, so they show the numbers of wandb and TensorBoard.
"""

import json
import math
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
)
from torchtitan.tools.logging import logger

from mxtrain.analysis.metrics_file import MetricsWriter
from mxtrain.analysis.numerics import PREFIX
from mxtrain.checkpoints.start import require_no_other_run, resumed_step
from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file
from mxtrain.rng.rounding_position import step_is_set
from mxtrain.run_folder.files import FACTS_FILE, METRICS_FILE
from mxtrain.titan.reports.facts import run_facts
from mxtrain.titan.reports.terminal import go_on_without, note, show_line, show_status
from mxtrain.titan.reports.wandb_resume import chosen_by_user, earlier_run
from mxtrain.titan.reports.wandb_run import WandbLogger, wandb_facts
from mxtrain.titan.schedule import guard_in, schedule_in

# Key in a row of metrics.jsonl -> name of the same number in TorchTitan 0.2.2.
TRAINING_KEYS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_second": "throughput(tps)",
    "memory_gib": "memory/max_reserved(GiB)",
    "tokens_seen": "n_tokens_seen",
}
VALIDATION_KEYS = {"validation_loss": "validation_metrics/loss"}


class WithoutGradientNorm(LoggerContainer):
    """Keeps the gradient norm from all loggers: with ``optimizer.early_step_in_backward`` TorchTitan's is always 0."""

    def log(self, metrics: dict, step: int) -> None:
        super().log({name: value for name, value in metrics.items() if name != TRAINING_KEYS["grad_norm"]}, step)


class MetricsFileLogger(BaseLogger):
    """Writes TorchTitan's metrics to ``metrics.jsonl``, in the format of ``mxtrain.analysis.metrics_file``.

    While the file cannot be written, for example on a full disk, training goes on and rows wait in memory.
    """

    def __init__(self, path: Path, steps_done: int = 0):
        self.writer = MetricsWriter(path, steps_done)
        self.is_failing = False

    def log(self, metrics: dict, step: int) -> None:
        keys = VALIDATION_KEYS if VALIDATION_KEYS["validation_loss"] in metrics else TRAINING_KEYS
        row = {"step": step}
        row.update({key: float(metrics[source]) for key, source in keys.items() if source in metrics})
        row.update({key: value for key, value in metrics.items() if key.startswith(PREFIX)})
        if "tokens_seen" in row:
            row["tokens_seen"] = int(row["tokens_seen"])
        self._write(row)

    def log_event(self, step: int, text: str) -> None:
        self._write({"step": step, "event": text})

    def _write(self, row: dict) -> None:
        row["time"] = time.time()
        try:
            if self.writer.write(row):
                logger.warning(
                    f"step {row['step']}: {self.writer.path} was removed, moved or replaced: rows go on there; other "
                    "files of the run's folder may be gone, such as the lock that keeps another run out"
                )
        except OSError as error:
            if not self.is_failing:
                logger.warning(
                    f"step {row['step']}: {self.writer.path} cannot be written: {reason(error)}; training goes on, and "
                    "the rows are kept until they can be written"
                )
            self.is_failing = True
        else:
            if self.is_failing:
                note(f"step {row['step']}: {self.writer.path} is complete again")
            self.is_failing = False

    def close(self) -> None:
        try:
            self.writer.close()
        except OSError as error:
            logger.warning(f"{self.writer.path} cannot be written: {reason(error)}; the last rows are lost")


class NonFiniteLogger(BaseLogger):
    """Warns when a logged training loss begins to be NaN or infinite."""

    def __init__(self):
        self.was_finite = True

    def log(self, metrics: dict, step: int) -> None:
        if TRAINING_KEYS["loss"] not in metrics:
            return
        loss = float(metrics[TRAINING_KEYS["loss"]])
        if not math.isfinite(loss) and self.was_finite:
            logger.warning(f"step {step}: the loss is {loss}; training goes on")
        self.was_finite = math.isfinite(loss)


class ProgressLogger(BaseLogger):
    """Shows every logged step on the terminal, and every validation loss in a line that stays."""

    def __init__(self, steps: int, processes: int):
        self.steps = steps
        self.rate_unit = "tokens/s" if processes == 1 else "tokens/s per device"
        self.first: tuple[int, float] | None = None  # the first logged step of this process, and its time

    def log(self, metrics: dict, step: int) -> None:
        now = time.perf_counter()
        words = [f"step {step:{len(str(self.steps))}}/{self.steps}"]
        if VALIDATION_KEYS["validation_loss"] in metrics:
            show_line(f"{words[0]}  validation loss {metrics[VALIDATION_KEYS['validation_loss']]:.4f}")
            return
        if TRAINING_KEYS["loss"] not in metrics:
            return
        words.append(f"loss {float(metrics[TRAINING_KEYS['loss']]):.4f}")
        words.append(f"{metrics[TRAINING_KEYS['tokens_per_second']]:,.0f} {self.rate_unit}")
        if self.first is None:
            self.first = step, now
        elif step < self.steps:
            # At the mean speed since the first logged step, whose own time is mostly warm-up.
            first_step, first_time = self.first
            left = (self.steps - step) * (now - first_time) / (step - first_step)
            words.append(f"{timedelta(seconds=round(left))} left")
        show_status("  ".join(words))


def build_metrics_processor(job_config, parallel_dims, model_args=None, tag=None) -> MetricsProcessor:
    """Build TorchTitan's ``MetricsProcessor`` with the loggers of the job config and mxtrain's own.

    Rank 0 also writes ``metrics.jsonl`` and ``run.json`` into ``job.dump_folder`` and shows progress, whatever loggers
    are enabled. The config of a wandb run receives ``run_facts``. If wandb cannot start, a warning is logged and
    training continues.

    Raises:
        ConfigError: if the run would replace the metrics of another.
    """
    on_metrics_rank = torch.distributed.get_rank() == 0
    wants_wandb = job_config.metrics.enable_wandb and (on_metrics_rank or job_config.metrics.save_for_all_ranks)
    folder = Path(job_config.job.dump_folder)
    steps_done, earlier = 0, None
    if on_metrics_rank:
        checkpoint = job_config.checkpoint
        if not step_is_set():  # -m torchtitan.train, which has not looked
            require_no_other_run(folder, checkpoint)
            if schedule_in(job_config) or guard_in(job_config):
                raise ConfigError(
                    "mxnorm.schedule and mxnorm.guard need mxtrain's trainer: train with -m mxtrain.train"
                )
        steps_done = resumed_step(folder, checkpoint)
        earlier = earlier_run(folder) if steps_done > 0 else None
    continued = None if chosen_by_user() else earlier

    facts = run_facts(job_config) if on_metrics_rank or wants_wandb else {}
    wandb_logger = partial(WandbLogger, facts=facts, folder=folder if on_metrics_rank else None, continued=continued)
    loggers = WithoutGradientNorm if job_config.optimizer.early_step_in_backward else LoggerContainer
    # TorchTitan's processor looks these up in its module. It would choose a rank of the last stage of a pipeline. Here
    # all stages know the loss, and rank 0 the user.
    own_parts = {"WandBLogger": wandb_logger, "_get_metrics_rank": lambda *args: 0, "LoggerContainer": loggers}
    with patch.multiple("torchtitan.components.metrics", **own_parts):
        processor = MetricsProcessor(job_config, parallel_dims, tag)
    if not (on_metrics_rank or wants_wandb):
        return processor

    if not isinstance(processor.logger, LoggerContainer):
        processor.logger = loggers()
    to_wandb = next((one for one in processor.logger._loggers if isinstance(one, WandbLogger)), None)
    where = wandb_facts()
    if to_wandb is not None:
        where = wandb_facts(to_wandb.run, folder)
        _tell_about_wandb(where, to_wandb.last_step, steps_done)
    elif wants_wandb:
        logger.warning("wandb did not start: training continues without it; metrics are in metrics.jsonl")
    if earlier and where["id"] is None:
        where["id"] = earlier.id  # a later start may have wandb again
    facts["wandb"] = where
    if on_metrics_rank:
        _write_facts(folder / FACTS_FILE, facts)
        processor.logger.add_logger(MetricsFileLogger(folder / METRICS_FILE, steps_done))
        if not step_is_set():  # mxtrain's trainer looks at the loss of every step itself
            processor.logger.add_logger(NonFiniteLogger())
        processor.logger.add_logger(ProgressLogger(job_config.training.steps, facts["world_size"]))
    return processor


def log_event(processor: MetricsProcessor, step: int, text: str) -> None:
    """Log what changes with ``step``, or ends the run after it, in a few words, to metrics.jsonl and wandb."""
    if isinstance(processor.logger, LoggerContainer):
        for one in processor.logger._loggers:
            if isinstance(one, MetricsFileLogger | WandbLogger):
                one.log_event(step, text)


def log_loss(processor: MetricsProcessor, step: int, loss: float, tokens_seen: int) -> None:
    """Write a row to metrics.jsonl with nothing but the loss of a step and the tokens of all ranks up to it."""
    if isinstance(processor.logger, LoggerContainer):
        for one in processor.logger._loggers:
            if isinstance(one, MetricsFileLogger):
                one.log({TRAINING_KEYS["loss"]: loss, TRAINING_KEYS["tokens_seen"]: tokens_seen}, step)


def _tell_about_wandb(where: dict, last_step: int, steps_done: int) -> None:
    """Show where the wandb run is. It has ``last_step`` steps already, ``steps_done`` of which are not repeated."""
    if last_step > 0:
        logger.info(f"wandb run {where['id']} continues after step {last_step}")
    if last_step > steps_done:
        note(f"wandb keeps its values of steps {steps_done + 1} to {last_step}; those of this run are in metrics.jsonl")
    if where["mode"] == "offline":
        logger.info(f"wandb is offline; upload this run with: {where['sync']}")
    elif where["mode"] == "online":
        note(f"wandb run: {where['url']}")


def _write_facts(path: Path, facts: dict) -> None:
    with go_on_without(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, (json.dumps(facts, indent=2) + "\n").encode())
