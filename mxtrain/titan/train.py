"""Train with TorchTitan's Trainer. Mistakes in the settings are found before anything is built."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
from torchtitan.train import Trainer

from mxtrain.analysis import closing_summary
from mxtrain.config import dump_config
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.rng.rounding_position import set_rounding_step
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.read import places
from mxtrain.titan import terminal
from mxtrain.titan.parse import non_default_values, parse_job_config, settings_of

FIRST_WORD_SECONDS = 3.0


class _Trainer(Trainer):
    """TorchTitan's trainer that sets the step and the microbatch for stochastic rounding.

    Both follow from the trainer's own step, so a resumed run draws the same random bits as an uninterrupted run.
    """

    def train_step(self, data_iterator):
        self._microbatch = 0
        super().train_step(data_iterator)

    def forward_backward_step(self, **kwargs):
        set_rounding_step(self.step, self._microbatch)
        self._microbatch += 1
        return super().forward_backward_step(**kwargs)


def _write_resolved_config(job_config) -> None:
    """Write every setting that differs from its default, flags included, to ``config.toml`` in the run's folder."""
    values = non_default_values(job_config)
    values.get("job", {}).pop("config_file", None)
    dump_config(values, Path(job_config.job.dump_folder) / "config.toml")


def train(args: list[str], verbose: bool) -> None:
    """Train a model, and end with a summary of the run.

    Args:
        args: TorchTitan's command-line flags, with ``--job.config_file`` among them.
        verbose: show all lines of TorchTitan's log on the terminal.

    Raises:
        ConfigError: for a mistake in the settings.
    """
    job_config = parse_job_config(args)
    check_machine(settings_of(job_config), Machine(int(os.environ["WORLD_SIZE"]), torch.cuda.is_available()))
    folder = Path(job_config.job.dump_folder)
    terminal.start(folder, verbose)
    trainer = None
    try:
        trainer = _Trainer(job_config)
        is_first = torch.distributed.get_rank() == 0
        if is_first:
            _write_resolved_config(job_config)
        if job_config.checkpoint.create_seed_checkpoint:
            trainer.checkpointer.save(curr_step=0, last_step=True)
            terminal.note("Created seed checkpoint")
            return
        trainer.train()
    finally:
        if trainer is not None:
            trainer.close()
        terminal.finish()
    if is_first:
        print(closing_summary(folder), flush=True)


def main(args: list[str], verbose: bool) -> None:
    """Run ``train`` in a worker process and exit. A ConfigError becomes one line on stderr, without a traceback."""
    status = 0
    try:
        with places(args):
            train(args, verbose)
    except ConfigError as error:
        status = CONFIG_ERROR_STATUS
        if os.environ.get("LOCAL_RANK", "0") != "0":
            # Most mistakes are found by all workers. The first one reports, and torchrun stops the others meanwhile.
            time.sleep(FIRST_WORD_SECONDS)
        print(f"mxtrain: error: {error}", file=sys.stderr, flush=True)
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    # Not after an interrupt or another exception: this rank may be alone, and would wait for the others.
    if status in (0, CONFIG_ERROR_STATUS) and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    sys.exit(status)
