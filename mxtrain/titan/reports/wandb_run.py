"""Log to wandb without letting it stop or block a training run.

wandb itself says whether it has credentials, and gives up on its server after its own timeouts. Without credentials, or
if the server does not answer in time, the run is offline: it records the same data for ``wandb sync``. WANDB_MODE,
WANDB_SILENT and wandb's other settings stay as the user set them.
"""

import os
import sys
from pathlib import Path

from torchtitan.components.metrics import BaseLogger
from torchtitan.tools.logging import logger

from mxtrain.analysis.metrics_file import NUMERICS
from mxtrain.analysis.numerics import wandb_key
from mxtrain.titan.reports.wandb_files import attach, draw_pictures, log_loss_chart
from mxtrain.titan.reports.wandb_names import wandb_names
from mxtrain.titan.reports.wandb_resume import EarlierRun, sync_command

TIMEOUTS = {"init_timeout": 30.0, "finish_timeout": 120.0}
"""
Seconds that wandb waits for its server at the start, after which the run is offline, and for the upload at the end. The
environment variables WANDB_INIT_TIMEOUT and WANDB_FINISH_TIMEOUT set others
"""

TOKENS = "n_tokens_seen"
BY_TOKENS = ("loss_metrics/*", "validation_metrics/loss", "grad_norm", "lr")
"""Metrics whose charts have the tokens seen as their x-axis"""


LAUNCH = "wandb.sdk.launch"
"""wandb's package for jobs of its launch agent, whose import takes 0.5 s or more"""


class WandbLogger(BaseLogger):
    """Logs TorchTitan's metrics to wandb, with the run's files, and with both losses in one chart.

    It takes the place of TorchTitan's ``WandBLogger`` and its arguments. A failure of wandb after the start is one
    warning, and training goes on.

    Args:
        facts: of the run, as in run.json.
        folder: of the run, whose files are attached; None for none.
        continued: the wandb run so far, which this one continues. Its steps are not logged again.
    """

    def __init__(
        self,
        log_dir: str,
        job_config,
        tag: str | None,
        *,
        facts: dict,
        folder: Path | None,
        continued: EarlierRun | None,
    ):
        import wandb

        self.tag, self.folder = tag, folder
        self.last_step, self.tokens_per_step, self.has_files, self.has_failed = 0, 0.0, False, False
        os.makedirs(log_dir, exist_ok=True)
        settings = wandb.setup().settings
        arguments = wandb_names(job_config.metrics, facts, settings, continued is not None)
        if continued is not None:
            arguments |= {"id": continued.id, "resume": settings.resume or "allow"}
        run_folder = Path(job_config.job.dump_folder)
        stay_offline = continued is not None and sync_command(run_folder, continued.id) is not None
        sections = job_config.to_dict()
        self.run = start_run(stay_offline, dir=log_dir, config=sections, **arguments)
        if continued is not None and not self.run.disabled:
            # A server knows which steps have reached it.
            self.last_step = self.run.starting_step - 1 if self.run.resumed else continued.last_step
        # The sections of the job config keep their names.
        own = {key: value for key, value in facts.items() if key not in sections}
        self.run.config.update(own, allow_val_change=True)
        self.run.define_metric(self._key(TOKENS))
        for name in BY_TOKENS:
            self.run.define_metric(self._key(name), step_metric=self._key(TOKENS))

    def log(self, metrics: dict, step: int) -> None:
        if step <= self.last_step:
            return
        if TOKENS in metrics:
            self.tokens_per_step = metrics[TOKENS] / step
        elif self.tokens_per_step:
            metrics = {**metrics, TOKENS: round(self.tokens_per_step * step)}
        metrics = {wandb_key(name) if name.startswith(NUMERICS) else name: value for name, value in metrics.items()}
        self._try(lambda: self.run.log({self._key(name): value for name, value in metrics.items()}, step=step))
        if not self.has_files:  # all of them are there, and those that change later are attached again at the end
            self.has_files = True
            self._attach()

    def log_event(self, step: int, text: str) -> None:
        """Log a text with a step, in the column "event"; the run's summary keeps the last one."""
        if step > self.last_step:
            self._try(lambda: self.run.log({self._key("event"): text}, step=step))

    def close(self) -> None:
        if self.folder is not None and not self.run.disabled:
            self._try(lambda: draw_pictures(self.folder))
            self._attach()
            # Only now: online, wandb asks its server before it takes a chart, and waits for 20 s if there is no answer.
            self._try(lambda: log_loss_chart(self.run, self.folder, self._key("losses")))
        try:
            self.run.finish()
        except TimeoutError:
            place = Path(self.run.dir).resolve().parent
            logger.warning(f"wandb's server did not take everything in time; upload the rest with: wandb sync {place}")
        except Exception as error:
            self._warn(error)

    def _key(self, name: str) -> str:
        return name if self.tag is None else f"{self.tag}/{name}"

    def _attach(self) -> None:
        if self.folder is not None and not self.run.disabled:
            self._try(lambda: attach(self.run, self.folder))

    def _try(self, action) -> None:
        try:
            action()
        except Exception as error:
            self._warn(error)

    def _warn(self, error: Exception) -> None:
        if not self.has_failed:
            logger.warning(f"wandb failed: {first_line(error)}; training goes on, and metrics are in metrics.jsonl")
        self.has_failed = True


def start_run(stay_offline: bool = False, **arguments):
    """Return ``wandb.init(**arguments)``, silent, and offline where it cannot be online.

    Args:
        stay_offline: do not go online, unless WANDB_MODE says so.

    Raises whatever wandb raises for wrong settings, such as WANDB_MODE = "sideways".
    """
    import wandb

    # wandb reads the environment only once per process, so settings change through wandb.setup.
    choices = {name: seconds for name, seconds in TIMEOUTS.items() if f"WANDB_{name.upper()}" not in os.environ}
    if "WANDB_SILENT" not in os.environ:
        choices["silent"] = True  # the summary says where the run is
    wandb.setup(settings=wandb.Settings(**choices, finish_timeout_raises=True))
    if LAUNCH not in sys.modules:  # without it there are no inputs of a launch job, and the look for them imports it
        wandb.Run._detect_and_apply_job_inputs = lambda run: None
    mode = wandb.setup().settings.mode
    if mode == "online" and stay_offline and "WANDB_MODE" not in os.environ:
        mode = "offline"
    if mode == "online":
        try:
            if wandb.login(verify=False, prompt=False):
                return wandb.init(**arguments)
        except Exception as error:
            logger.warning(f"wandb cannot be online: {first_line(error)}; the run is offline")
        mode = "offline"
    wandb.setup(settings=wandb.Settings(mode=mode))
    return wandb.init(**arguments)


def first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def wandb_facts(run=None, folder: Path | None = None) -> dict:
    """Return a run's ``mode`` (online, offline or disabled), ``id``, ``dir``, ``url`` and the ``sync`` command.

    Args:
        run: a ``wandb.Run``, or None for no run.
        folder: of the training run, where the folders of earlier starts are.
    """
    if run is None or run.disabled:
        return {"mode": "disabled", "id": None, "dir": None, "url": None, "sync": None}
    place = Path(run.dir).resolve().parent
    if run.offline:
        sync = sync_command(folder or place.parent, run.id)
        return {"mode": "offline", "id": run.id, "dir": str(place), "url": None, "sync": sync}
    return {"mode": "online", "id": run.id, "dir": str(place), "url": run.url, "sync": None}
