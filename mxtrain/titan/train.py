"""Train with TorchTitan's Trainer. Mistakes in the settings are found before anything is built."""

import os
import signal
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from mxtrain.analysis import closing_summary
from mxtrain.config import dump_config
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.rng.rounding_position import set_rounding_step
from mxtrain.run_folder.checkpoints import Checkpoints, mark_incomplete
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.run_folder.lock import locked
from mxtrain.run_folder.start import CheckpointSettings, find_start, latest_checkpoint, require_folder
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import places
from mxtrain.settings.resume_check import check_resume
from mxtrain.settings.resume_run import resolved
from mxtrain.titan import finite, terminal
from mxtrain.titan.finite import LossWatch, NonFiniteError, nonfinite_weights
from mxtrain.titan.metrics import leave_losses_to_trainer
from mxtrain.titan.parse import non_default_values, parse_job_config, settings_of
from mxtrain.titan.resumed_optimizer import apply_settings

FIRST_WORD_SECONDS = 3.0


class _Trainer(Trainer):
    """TorchTitan's trainer with four additions.

    It sets the step and the microbatch for stochastic rounding. Both follow from the trainer's own step, so a resumed
    run draws the same random bits as an uninterrupted run.

    It gives the optimizer of a resumed run its present settings, where the checkpoint has those of the run so far.

    It looks for losses and weights that are not finite, and never saves such weights.

    It counts complete checkpoints only when it removes old ones.
    """

    def __init__(self, job_config):
        super().__init__(job_config)
        self._stops = job_config.metrics.on_nonfinite_loss == finite.STOP
        self._watch = LossWatch(self.device, self._stops)
        leave_losses_to_trainer(self.metrics_processor)
        self._load = self.checkpointer.load
        self.checkpointer.load = self._load_and_apply_settings
        self._save = self.checkpointer.save
        self.checkpointer.save = self._save_if_finite
        self.checkpointer._purge_stale_checkpoints = self._purge

    def train(self):
        try:
            super().train()
            self._watch.look(at_last_step=True)  # the text may end before the last step
        except NonFiniteError:
            if self.checkpointer.enable:
                self.checkpointer._async_wait()  # the last checkpoint, with finite weights, becomes complete
            raise

    def _load_and_apply_settings(self, step: int = -1) -> bool:
        loaded = self._load(step)
        if loaded:
            rates = apply_settings(self.optimizers, self.lr_schedulers)
            if self.step > 0 and rates.kept != rates.present:
                terminal.note(f"learning rate of step {self.step + 1}: {rates.present:.4g} (was {rates.kept:.4g})")
        return loaded

    def train_step(self, data_iterator):
        self._losses = []
        super().train_step(data_iterator)
        self._watch.record(self.step, self._losses)
        # A CPU has finished the step, and logging waited for the device.
        waited = self.device.type == "cpu" or self.metrics_processor.should_log(self.step)
        self._watch.look(at_last_step=waited)

    def forward_backward_step(self, **kwargs):
        set_rounding_step(self.step, microbatch=len(self._losses))
        loss = super().forward_backward_step(**kwargs)
        self._losses.append(loss.detach())
        return loss

    def _save_if_finite(self, curr_step: int, last_step: bool = False) -> None:
        if self.checkpointer._should_save(curr_step, last_step):
            self._watch.look(at_last_step=True)
            # The loss of a step says nothing about the weights after it: gradients may have overflowed.
            if found := nonfinite_weights(self.model_parts, self.device):
                found = f"step {curr_step}: the weights after this step hold {found}"
                if self._stops:
                    raise NonFiniteError(found)
                logger.warning(f"{found}; no checkpoint is saved")
                return
            if _is_first():
                mark_incomplete(Path(self.checkpointer._create_checkpoint_id(curr_step)))
        self._save(curr_step, last_step)

    def _purge(self) -> None:
        """Remove stale checkpoints, in TorchTitan's thread for that. TorchTitan counts parts of checkpoints, too."""
        if _is_first():
            for path in Checkpoints(Path(self.checkpointer.folder)).stale(self.checkpointer.keep_latest_k):
                self.checkpointer.purge_queue.put(str(path))


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _write_resolved_config(job_config) -> None:
    """Write every setting that differs from its default, flags included, to ``config.toml`` in the run's folder.

    Without the folder's own name: a run of this file must not write into this folder.
    """
    values = non_default_values(job_config)
    for name in ("config_file", "dump_folder"):
        values.get("job", {}).pop(name, None)
    path = Path(job_config.job.dump_folder) / CONFIG_FILE
    with terminal.go_on_without(path):
        dump_config(values, path)


def train(args: list[str], verbose: bool) -> None:
    """Train a model, and end with a summary of the run.

    Args:
        args: TorchTitan's command-line flags, with ``--job.config_file`` among them.
        verbose: show all lines of TorchTitan's log on the terminal.

    Raises:
        ConfigError: for a mistake in the settings, or a run's folder that is in use or holds another run.
        NonFiniteError: if a loss or weight is NaN or infinite, and ``metrics.on_nonfinite_loss`` is "stop".
    """
    job_config = parse_job_config(args)
    folder = require_folder(job_config.job.dump_folder)
    job_config.job.dump_folder = str(folder)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = settings_of(job_config)
    check_machine(settings, Machine(processes, torch.cuda.is_available()))
    with locked(folder) if _is_first() else nullcontext() as warning:
        # Every rank looks. Nothing changes in the folder before all ranks have met in the process group.
        start = find_start(folder, CheckpointSettings.of(job_config.checkpoint), processes)
        changes = check_resume(folder, start.step, settings, processes)
        terminal.start(folder, verbose)
        if warning:
            logger.warning(warning)
        for note in (*start.notes, *changes):
            terminal.note(note)
        if start.step >= job_config.training.steps:
            terminal.note(
                f"nothing is left to train: training.steps = {job_config.training.steps}; set it to more steps, such "
                f"as --training.steps {2 * start.step}, and the run goes on"
            )
        try:
            _train(job_config)
        except NonFiniteError as error:
            if _is_first():
                terminal.Screen().line(closing_summary(folder))
            torch.distributed.barrier()  # all ranks are here, and torchrun stops the others when one ends
            raise NonFiniteError(f"{error}; training stops. {_ways_out(job_config)}") from error
        if _is_first() and not job_config.checkpoint.create_seed_checkpoint:
            terminal.Screen().line(closing_summary(folder))


def _train(job_config) -> None:
    trainer = None
    # Converters see that this trainer sets the step before every forward.
    set_rounding_step(0)
    try:
        trainer = _Trainer(job_config)
        if _is_first():
            _write_resolved_config(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.last_save_model_only = True  # where a run starts, there is nothing else to keep
            trainer.checkpointer.save(curr_step=0, last_step=True)
            terminal.note("Created seed checkpoint")
        else:
            trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
        terminal.finish()


def _ways_out(job_config) -> str:
    saved = latest_checkpoint(Path(job_config.job.dump_folder), CheckpointSettings.of(job_config.checkpoint))
    last = f"The last checkpoint, with finite weights, is {saved}" if saved else "There is no checkpoint"
    return (
        f"{last}. Try a lower optimizer.lr, more lr_scheduler.warmup_steps or a recipe with more bits; "
        f'{finite.SETTING} = "{finite.CONTINUE}" only warns'
    )


def main(args: list[str], verbose: bool) -> None:
    """Run ``train`` in a worker process and exit. An error of the user's run is one line on stderr, no traceback."""
    status = 0
    try:
        args = resolved(args)
        with places(args):
            train(args, verbose)
    except ConfigError as error:
        status = CONFIG_ERROR_STATUS
        _report(error)
    except NonFiniteError as error:
        status = 1
        _report(error)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    # Not after an interrupt or another exception: this rank may be alone, and would wait for the others.
    if status != 128 + signal.SIGINT and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(status)


def _report(error: Exception) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors are found by all workers. The first one reports, and torchrun stops the others meanwhile.
        time.sleep(FIRST_WORD_SECONDS)
    print(f"mxtrain: error: {error}", file=sys.stderr, flush=True)
