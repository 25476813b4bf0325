"""Train a model. Mistakes in the settings are found before anything is built."""

import json
import os
import signal
import sys
import time
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import torch
from torch.distributed.elastic.multiprocessing.errors import get_error_handler, record
from torchtitan.tools.logging import init_logger, logger

from mxtrain import ranks
from mxtrain.analysis import closing_summary
from mxtrain.checkpoints import terminal
from mxtrain.checkpoints.checkpointer import SaveError
from mxtrain.checkpoints.ending import CONTINUE, SETTING, NonFiniteError, Stop
from mxtrain.checkpoints.run_folder import CONFIG_FILE, locked
from mxtrain.checkpoints.start import Start, latest_checkpoint, require_folder
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import START_VARIABLE, report_stop
from mxtrain.ranks import is_first
from mxtrain.rng.rounding import set_rounding_step
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import places, read_settings
from mxtrain.settings.resume import checked_start, resolved
from mxtrain.titan.job_config import check_job
from mxtrain.titan.releases import engine
from mxtrain.titan.run_start import write_resolved_config

FIRST_WORD_SECONDS, LAST_WORD_SECONDS = 3.0, 1.0


def train(args: list[str], verbose: bool) -> Stop | None:
    """Train a model, and end with a summary of the run. Return how a signal stopped it, or None.

    Raises:
        ConfigError: for a mistake in the settings, or a run's folder that is in use or holds another run.
        NonFiniteError: if a loss or weight is NaN or infinite, and ``metrics.on_nonfinite_loss`` is "stop".
    """
    settings = read_settings(args)
    if "LOCAL_RANK" not in os.environ:
        raise ConfigError("-m mxtrain.train needs torchrun; write 'torchrun ... -m mxtrain.train' or 'mxtrain train'")
    folder = require_folder(settings["job.dump_folder"])
    settings = settings.replaced({"job.dump_folder": str(folder)})
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    find = partial(checked_start, folder, settings, processes)
    found = Start.from_json(json.loads(os.environ[START_VARIABLE])) if START_VARIABLE in os.environ else None
    warning = None
    with ExitStack() as stack:

        def check() -> dict[str, str]:
            """Check what no launcher has checked, and find where the run starts. Returns the settings that it keeps."""
            nonlocal found, warning
            check_job(settings, Machine(processes, torch.cuda.is_available()))
            if is_first():
                warning = stack.enter_context(locked(folder))
            found = find()
            return found.settings

        # All ranks fail together, and nothing changes in the folder before all have passed.
        first, *_ = ranks.run_on_all_ranks(check if found is None and ranks.is_first_of_node() else None)
        settings = settings.replaced(found.settings if found else first["result"])
        job_config = settings.values
        init_logger()
        terminal.start(folder, verbose)
        ranks.note = terminal.note
        if warning:
            logger.warning(warning)
        try:
            stop = _train(partial(engine().Trainer, settings, find, found))
        except (NonFiniteError, SaveError) as error:
            if is_first():
                terminal.show(closing_summary(folder))
            if isinstance(error, SaveError):
                raise
            torch.distributed.barrier()  # all ranks are here, and a launcher stops the others when one ends
            raise NonFiniteError(f"{error}; training stops. {_ways_out(job_config)}", error.step, error.loss) from error
        if stop is not None:
            terminal.note(stop.describe(folder, job_config.checkpoint))
        if is_first() and not job_config.checkpoint.create_seed_checkpoint:
            terminal.show(closing_summary(folder))
        if is_first() and stop is not None:
            report_stop(stop.signal)
        return stop


def _train(build) -> Stop | None:
    """Train with the trainer that ``build`` returns. Return which signal stopped it, or None if it came to its end."""
    trainer = None
    # Converters see that this trainer sets the step before every forward.
    set_rounding_step(0)
    try:
        trainer = build()
        job_config = trainer.job_config
        if is_first() and not ((folder := Path(job_config.job.dump_folder)) / CONFIG_FILE).exists():
            write_resolved_config(folder, trainer.settings)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(0, last_step=True, weights_only=True)  # there is nothing else to keep yet
            trainer.checkpointer.finish()
            terminal.note("Created seed checkpoint")
        else:
            trainer.train()
        return trainer.stop
    finally:
        if trainer is not None:
            trainer.close()


def _ways_out(job_config) -> str:
    saved = latest_checkpoint(Path(job_config.job.dump_folder), job_config.checkpoint)
    last = f"The last checkpoint, with finite weights, is {saved}" if saved else "There is no checkpoint"
    return (
        f"{last}. Try a lower optimizer.lr, more lr_scheduler.warmup_steps or a recipe with more bits; "
        f'{SETTING} = "{CONTINUE}" only warns'
    )


@record
def work(args: list[str], verbose: bool) -> int:
    """Run ``train`` and return the exit status. An error of the user's run is one line on stderr, no traceback.

    The status is 0, also after a stop by a signal, 1 or 2. Other exceptions go into the worker's error file, in which
    ``mxtrain train`` and torchrun look for the first cause.
    """
    status, all_know = 0, False
    try:
        args = resolved(args)
        with places(args):
            try:
                train(args, verbose)
            except ranks.CommonError:
                all_know = True
                raise
    except (ConfigError, NonFiniteError, SaveError) as error:
        status = CONFIG_ERROR_STATUS if isinstance(error, ConfigError) else 1
        if not ranks.is_first_of_node():
            # Most errors are found by all workers. The first one reports, and the launcher kills the others meanwhile.
            time.sleep(FIRST_WORD_SECONDS)
        if ranks.is_first_of_node() or not all_know:
            get_error_handler().record_exception(error)
            print(f"mxtrain: error: {error}", file=sys.stderr, flush=True)
    except Exception:
        # Another worker may have ended first, and cut a collective short. The launcher then ends this one, before it
        # prints a traceback that hides the cause.
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(LAST_WORD_SECONDS)
        raise
    # Not after another exception: this rank may be alone, and would wait for the others.
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return status
