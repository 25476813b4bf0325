"""Takes TorchTitan's metrics of every logged step: into ``metrics.jsonl``, onto the terminal, and as warnings."""

import logging
import math
import time
from datetime import timedelta
from pathlib import Path

from mxtrain.analysis.metrics_file import NUMERICS, MetricsWriter
from mxtrain.files import reason
from mxtrain.reports.terminal import note, show_line, show_status

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
        place = f"step {row['step']}: {self.writer.path}"
        try:
            self.writer.write(row)
        except OSError as error:
            if not self.is_failing:
                logger.warning(
                    f"{place} cannot be written: {reason(error)}; training goes on, and the rows are kept until they "
                    "can be written"
                )
            self.is_failing = True
        else:
            if self.is_failing:
                note(f"{place} is complete again")
            self.is_failing = False

    def close(self) -> None:
        try:
            self.writer.flush()
        except OSError as error:
            logger.warning(f"{self.writer.path} cannot be written: {reason(error)}; the last rows are lost")


class NonFiniteLogger:
    """Warns when a logged training loss begins to be NaN or infinite."""

    was_finite = True

    def log(self, metrics: dict, step: int) -> None:
        if LOSS in metrics:
            is_finite = math.isfinite(metrics[LOSS])
            if self.was_finite and not is_finite:
                logger.warning(f"step {step}: the loss is {float(metrics[LOSS])}; training goes on")
            self.was_finite = is_finite

    def close(self) -> None:
        pass


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
        words.append(f"{row['tflops']:,.4g} TFLOP/s{self.each}")
        if "mfu" in row:
            words.append(f"MFU {row['mfu']:.1f} %")
        show_status("  ".join(words))

    def close(self) -> None:
        pass
