"""Train a model. Mistakes in the settings are found before anything is built."""

import os
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torchtitan.tools.logging import init_logger, logger

from mxtrain.analysis import closing_summary
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import report_stop
from mxtrain.reports import terminal
from mxtrain.rng.rounding import set_rounding_step
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.run_folder.lock import locked
from mxtrain.run_folder.start import CheckpointSettings, find_start, latest_checkpoint, require_folder
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import places, read_settings
from mxtrain.settings.resume import check_resume, resolved
from mxtrain.titan import finite
from mxtrain.titan.agreement import is_first
from mxtrain.titan.check_job import check_job
from mxtrain.titan.checkpoint.checkpointer import SaveError
from mxtrain.titan.finite import NonFiniteError
from mxtrain.titan.parse import job_config_of
from mxtrain.titan.resolved_config import write_resolved_config
from mxtrain.titan.stop import Stop
from mxtrain.titan.trainer import Trainer

FIRST_WORD_SECONDS = 3.0


def train(args: list[str], verbose: bool) -> None:
    """Train a model, and end with a summary of the run.

    Args:
        args: TorchTitan's command-line flags, with ``--job.config_file`` among them.
        verbose: show all lines of TorchTitan's log on the terminal.

    Raises:
        ConfigError: for a mistake in the settings, or a run's folder that is in use or holds another run.
        NonFiniteError: if a loss or weight is NaN or infinite, and ``metrics.on_nonfinite_loss`` is "stop".
    """
    settings = read_settings(args)
    job_config = job_config_of(settings)
    if "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            "-m mxtrain.train is for torchrun: torchrun --nproc_per_node=1 -m mxtrain.train, or mxtrain train"
        )
    folder = require_folder(job_config.job.dump_folder)
    job_config.job.dump_folder = str(folder)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    check_job(settings, Machine(processes, torch.cuda.is_available()))
    with locked(folder) if is_first() else nullcontext() as warning:
        # Every rank looks. Nothing changes in the folder before all ranks have met in the process group.
        start = find_start(folder, CheckpointSettings.of(job_config.checkpoint), processes)
        check_resume(start, settings, processes)
        init_logger()
        terminal.start(folder, verbose)
        if warning:
            logger.warning(warning)
        try:
            stop = _train(job_config)
        except (NonFiniteError, SaveError) as error:
            if is_first():
                terminal.Screen().line(closing_summary(folder))
            if isinstance(error, SaveError):
                raise
            torch.distributed.barrier()  # all ranks are here, and torchrun stops the others when one ends
            raise NonFiniteError(f"{error}; training stops. {_ways_out(job_config)}", error.step, error.loss) from error
        if stop is not None:
            terminal.note(stop.describe(folder, CheckpointSettings.of(job_config.checkpoint)))
        if is_first() and not job_config.checkpoint.create_seed_checkpoint:
            terminal.Screen().line(closing_summary(folder))
        if is_first() and stop is not None:
            report_stop(stop.signal)


def _train(job_config) -> Stop | None:
    """Train, and return which signal stopped it, or None if it came to its end."""
    trainer = None
    # Converters see that this trainer sets the step before every forward.
    set_rounding_step(0)
    try:
        trainer = Trainer(job_config)
        if is_first() and not (Path(job_config.job.dump_folder) / CONFIG_FILE).exists():
            write_resolved_config(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.last_save_model_only = True  # where a run starts, there is nothing else to keep
            trainer.checkpointer.save(curr_step=0, last_step=True)
            trainer.checkpointer.finish()
            terminal.note("Created seed checkpoint")
        else:
            trainer.train()
        return trainer.stop
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
    except (NonFiniteError, SaveError) as error:
        status = 1
        _report(error)
    # Not after another exception: this rank may be alone, and would wait for the others.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(status)


def _report(error: Exception) -> None:
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # Most errors are found by all workers. The first one reports, and torchrun stops the others meanwhile.
        time.sleep(FIRST_WORD_SECONDS)
    print(f"mxtrain: error: {error}", file=sys.stderr, flush=True)
