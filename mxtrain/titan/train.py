"""Train with TorchTitan's Trainer. Mistakes in the settings are found before anything is built."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from unittest.mock import patch

import torch
from torchtitan.tools.logging import logger
from torchtitan.train import Trainer

from mxtrain.analysis import closing_summary
from mxtrain.analysis.metrics_file import lacks_validation, missing_rows
from mxtrain.analysis.runs import NONFINITE_WEIGHTS, SETTING_CHANGES
from mxtrain.config import dump_config, load_config
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.files import sync_file
from mxtrain.launched import report_stop
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.rng.rounding_position import set_rounding_step
from mxtrain.run_folder.checkpoints import set_aside
from mxtrain.run_folder.files import CONFIG_FILE, METRICS_FILE
from mxtrain.run_folder.lock import locked
from mxtrain.run_folder.manifest import Manifest, read_manifest
from mxtrain.run_folder.start import CheckpointSettings, Start, find_start, latest_checkpoint, require_folder
from mxtrain.settings.machine import Machine, check_machine
from mxtrain.settings.own_modules import search_beside
from mxtrain.settings.read import config_file, places
from mxtrain.settings.resume_changes import kept_defaults
from mxtrain.settings.resume_check import check_resume, moved_entries
from mxtrain.settings.resume_run import resolved
from mxtrain.titan import finite
from mxtrain.titan.agreement import run_on_all_ranks
from mxtrain.titan.buffers import kept_buffers
from mxtrain.titan.checkpoint.checkpointer import GUARD_STATE, RANDOM_STATE, Checkpointer, SaveError
from mxtrain.titan.checkpoint.random_state import RandomState
from mxtrain.titan.checkpoint.resumed_optimizer import apply_settings
from mxtrain.titan.checkpoint.token_count import TokenCount
from mxtrain.titan.checkpoint.verified_start import verified_start
from mxtrain.titan.finite import LossWatch, NonFiniteError, nonfinite_weights
from mxtrain.titan.parallel.check_layout import check_model_layout
from mxtrain.titan.parallel.context import correct_max_loss, tokens_of_other_ranks
from mxtrain.titan.parallel.pipeline import FINDS_SHAPES_AGAIN, LossPerToken, SharedLoss, Stage
from mxtrain.titan.parallel.replicate import Layout
from mxtrain.titan.parse import parse_job_config, resolved_settings, settings_of
from mxtrain.titan.reports import terminal
from mxtrain.titan.reports.facts import package_versions
from mxtrain.titan.reports.metrics import log_event, log_loss
from mxtrain.titan.reports.numerics import Numerics
from mxtrain.titan.same_settings import require_same_settings
from mxtrain.titan.schedule import RecipeSwitch
from mxtrain.titan.stop import Stop, StopSignals
from mxtrain.titan.without_effect import without_effect

FIRST_WORD_SECONDS = 3.0


class _Trainer(Trainer):
    """TorchTitan's trainer with some additions.

    It computes right gradients with replicas and pipelines, and every rank knows the loss of a pipeline.

    It gives the layers the recipes that the schedule and the guard have for a step.

    It sets the step and the microbatch for stochastic rounding. Both follow from the trainer's own step, so a resumed
    run draws the same random bits as an uninterrupted run.

    It gives the optimizer of a resumed run its present settings, where the checkpoint has those of the run so far.

    It begins with the validation of the checkpoint's step, where a kill came before that.

    It casts the weights once per step, if a step has several microbatches and the weights stay the same between them.

    It looks for losses and weights that are not finite, and never saves such weights.

    It verifies the checkpoint from which a run starts, and saves whole checkpoints only. They hold the random number
    generators' states, and the tokens seen by all ranks instead of one.

    It runs the extra pass of a step with diagnostics (``mxtrain.titan.reports.numerics``).

    It saves and stops, on all ranks after the same step, when one of them has got a stop signal. ``stop`` is then how.
    """

    stop: Stop | None = None
    _last_step = 0

    def __init__(self, job_config):
        with _own_parts():
            super().__init__(job_config)
        self.checkpointer.start = self._start
        self.checkpointer.run = _manifest(job_config, self.dataloader)
        self.checkpointer.may_save = self._is_finite
        # After a power failure, a checkpoint without the rows before it would leave a gap in the run's curves.
        self.checkpointer.before_save = partial(sync_file, Path(job_config.job.dump_folder) / METRICS_FILE)
        self._stops = job_config.metrics.on_nonfinite_loss == finite.STOP
        self._watch = LossWatch(self.device, self._stops)
        correct_max_loss(self.metrics_processor, self.parallel_dims.cp)
        self.checkpointer.is_stopping = lambda: self._watch.stop_signal is not None
        self.checkpointer.after_load = self._after_load
        self.checkpointer.states[RANDOM_STATE] = RandomState()
        moved = moved_entries(self._start, settings_of(job_config))
        self._switch = RecipeSwitch(job_config, self.model_parts, partial(log_event, self.metrics_processor), moved)
        if (guard := self._switch.guard) is not None:
            # All stages of a pipeline and all ranks of tensor parallelism have the same loss.
            mesh = self.parallel_dims.get_optional_mesh("loss")
            copies = self.parallel_dims.world_size // (1 if mesh is None else mesh.size())
            self._watch.on_losses = lambda step, losses: guard.observe(step, sum(losses) / copies)
            self.checkpointer.states[GUARD_STATE] = guard
        has_microbatches = self.gradient_accumulation_steps > 1 or self.parallel_dims.pp_enabled
        changes_between = job_config.optimizer.early_step_in_backward  # ReadyWeights cannot see fused steps
        caches = job_config.mxnorm.cache_weights and has_microbatches and not changes_between
        self._ready = ReadyWeights(self.model_parts) if caches else None
        self._tokens = TokenCount.of_layout(self.parallel_dims)
        self._signals = StopSignals()
        self._numerics = Numerics.of_job(job_config, self.model_parts)
        # The stages of a pipeline have the same text, and draw other random bits because their layers differ.
        self._rank_in_stage = torch.distributed.get_rank() % (self.parallel_dims.world_size // self.parallel_dims.pp)
        if self.parallel_dims.pp_enabled:
            self._share_loss_of_pipeline()
        if job_config.validation.enable:
            # Tokens of a validation would count for the next step's load balance of experts.
            self.validator.validate = kept_buffers(self.model_parts)(self.validator.validate)

    def _share_loss_of_pipeline(self) -> None:
        self._loss = self.pp_schedule._loss_fn = LossPerToken(self.loss_fn)
        group = self.parallel_dims.get_mesh("pp").get_group()
        self.pp_schedule = SharedLoss(
            self.pp_schedule, self.pp_has_last_stage, group, self.device, self.parallel_dims.cp
        )
        for user in (self, self.validator) if self.job_config.validation.enable else (self,):
            user.pp_schedule, user.pp_has_last_stage = self.pp_schedule, True

    def init_distributed(self):
        parallel_dims = super().init_distributed()
        # As soon as all ranks have met: what is built next looks into the run's folder, too.
        require_same_settings(self.job_config)
        self._start, self._changes = _start(self.job_config)
        return parallel_dims

    def train(self):
        try:
            super().train()
            self._watch.look(at_last_step=True)  # the text may end before the last step
        except NonFiniteError as error:
            self._log_end(error)
            self.checkpointer.finish()  # the last checkpoint, with finite weights, becomes complete
            raise
        finally:
            if self.stop is None:
                self._signals.restore()
        self.checkpointer.finish()

    def _log_end(self, error: NonFiniteError) -> None:
        """Log the weights or the loss that end the run; the loss unless its row or that of the step after it is there.

        A comparison does not start such a run again, and a report does not count it.
        """
        if error.loss is None:
            log_event(self.metrics_processor, error.step, NONFINITE_WEIGHTS)
            return
        if any(map(self.metrics_processor.should_log, {error.step, self._last_step})):
            return
        tokens = self._tokens.of_all_ranks(self.ntokens_seen)
        # A GPU has done the next step, too. Steps have as many tokens, unless a resumed run has changed that.
        log_loss(self.metrics_processor, error.step, error.loss, tokens * error.step // self._last_step)

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if self._watch.stop_signal is None:
            return True
        self._signals.ignore()
        self.stop = Stop(self._watch.stop_signal, self.step, is_saved=self.checkpointer.saved_step == self.step)
        return False

    def _after_load(self) -> None:
        if _is_first():
            # Only now: a run that was refused or failed before leaves the folder as it was.
            for path in self._start.abandoned:
                set_aside(path)
        self._validate_if_missing()
        if self.step >= self.job_config.training.steps:
            return  # nothing is left to train, and TorchTitan's schedule fails for steps after its end
        rates = apply_settings(self.optimizers, self.lr_schedulers)
        if self.step > 0 and rates.kept != rates.present:
            terminal.note(f"learning rate of step {self.step + 1}: {rates.present:.4g} (was {rates.kept:.4g})")
        if self.step > 0 and self._changes:
            # config.toml will have the new settings alone. One event, because wandb keeps one for each step.
            log_event(self.metrics_processor, self.step + 1, "; ".join(self._changes))

    def _validate_if_missing(self) -> None:
        """Validate the step from which the run resumes, if a kill came between its checkpoint and its validation."""
        of_own_step = self._start.step > 0 and self._start.checkpoint.parent == Path(self.checkpointer.folder)
        if not (of_own_step and self.job_config.validation.enable and self.validator.should_validate(self.step)):
            return
        metrics = Path(self.job_config.job.dump_folder) / METRICS_FILE
        ranks = run_on_all_ranks((lambda: lacks_validation(metrics, self.step)) if _is_first() else None)
        if not ranks[0]["result"]:
            return
        if self.parallel_dims.pp_enabled and not FINDS_SHAPES_AGAIN:
            terminal.note(f"step {self.step} was saved and not validated: this PyTorch cannot begin a pipeline so")
            return
        terminal.note(f"step {self.step} was saved and not validated: its validation comes first")
        self._switch.return_to(self.step)
        self.validator.validate(self.model_parts, self.step)

    def batch_generator(self, data_iterable):
        for inputs, labels in super().batch_generator(data_iterable):
            self.ntokens_seen -= tokens_of_other_ranks(labels, self.parallel_dims.cp)
            yield inputs, labels

    def train_step(self, data_iterator):
        self._losses = []
        self._switch.begin_step(self.step)
        super().train_step(data_iterator)
        if self._last_step == 0 and _is_first():
            _write_resolved_config(self.job_config)  # only now: a start that fails leaves an earlier one's settings
        self._watch.record(self.step, self._losses, self._signals.received)
        self._last_step = self.step  # TorchTitan counts one more step where the text ends
        # A CPU has finished the step, and logging waited for the device.
        waited = self.device.type == "cpu" or self.metrics_processor.should_log(self.step)
        self._watch.look(at_last_step=waited)
        # Until the first step is done, which compiles the model, there is nothing to save, and a signal stops at once.
        self._signals.install()

    def forward_backward_step(self, **kwargs):
        if self._numerics is not None and self._numerics.is_due(self.step) and not self._losses:
            self._measure(**kwargs)
        set_rounding_step(self.step, microbatch=len(self._losses), rank=self._rank_in_stage)
        if self._ready is not None:
            self._ready.refresh()
        loss = self._forward_and_backward(**kwargs)
        self._losses.append(loss.detach())
        if self._ready is not None and len(self._losses) == self.gradient_accumulation_steps:
            self._ready.drop()
        return loss

    def _forward_and_backward(self, *, global_valid_tokens, **kwargs) -> torch.Tensor:
        if self.parallel_dims.pp_enabled:
            with self._loss.divided_by(global_valid_tokens):
                return super().forward_backward_step(global_valid_tokens=1.0, **kwargs)
        return super().forward_backward_step(global_valid_tokens=global_valid_tokens, **kwargs)

    def _measure(self, *, input_dict, labels, global_valid_tokens) -> None:
        if not self.parallel_dims.pp_enabled:  # whose schedule takes whole microbatches
            input_dict, labels = self._numerics.sample(input_dict, labels)
        set_rounding_step(self.step, rank=self._rank_in_stage)
        with self._numerics.recording():
            self._forward_and_backward(
                input_dict=dict(input_dict), labels=labels, global_valid_tokens=global_valid_tokens
            )
        if figures := self._numerics.figures():
            self.metrics_processor.logger.log(figures, self.step)

    def state_dict(self):
        return {**super().state_dict(), "ntokens_seen": self._tokens.of_all_ranks(self.ntokens_seen)}

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "ntokens_seen": self._tokens.share(state_dict["ntokens_seen"])})

    def _is_finite(self, step: int) -> bool:
        """Return whether all losses up to this step and the weights after it are finite. A loss that is not raises."""
        self._watch.look(at_last_step=True)
        # The loss of a step says nothing about the weights after it: gradients may have overflowed.
        if not (found := nonfinite_weights(self.model_parts, self.device)):
            return True
        found = f"step {step}: the weights after this step hold {found}"
        if self._stops:
            raise NonFiniteError(found, step)
        logger.warning(f"{found}; no checkpoint is saved")
        return False


@contextmanager
def _own_parts() -> Iterator[None]:
    """Let TorchTitan's trainer, which looks classes up in modules, find mxtrain's."""
    parts = {
        "torchtitan.train.CheckpointManager": Checkpointer,
        "torchtitan.train.ParallelDims": Layout,
        "torchtitan.train.ensure_pp_loss_visible": lambda *args: None,  # which warns that rank 0 does not know it
        "torchtitan.distributed.pipeline_parallel.PipelineStage": Stage,
    }
    with ExitStack() as patches:
        for name, part in parts.items():
            patches.enter_context(patch(name, part))
        yield


def _start(job_config) -> tuple[Start, list[str]]:
    """Return where the run starts and which settings have changed since then, and tell the user.

    Raises:
        ConfigError: as ``verified_start`` and ``check_resume``.
    """
    start = verified_start(Path(job_config.job.dump_folder), CheckpointSettings.of(job_config.checkpoint))
    changes = check_resume(start, settings_of(job_config), torch.distributed.get_world_size())
    excluded = _excluded(start, job_config.checkpoint.exclude_from_loading)
    gaps = _missing_rows(start, job_config)
    for line in (*start.notes, *changes, *excluded, *gaps, *_other_versions(start)):
        terminal.note(line)
    if start.step >= job_config.training.steps:
        terminal.note(
            f"nothing is left to train: training.steps = {job_config.training.steps}; set it to more steps, such as "
            f"--training.steps {2 * start.step}, and the run goes on"
        )
    for line in without_effect(job_config):
        terminal.note(line)
    return start, [*(line for line in changes if SETTING_CHANGES in line), *excluded]


def _excluded(start: Start, names: list[str]) -> list[str]:
    """Return a line for the user if a run that goes on leaves parts of its checkpoint out."""
    if start.step == 0 or not names:
        return []
    parts = " and ".join(names)
    return [f"checkpoint.exclude_from_loading: step {start.step + 1} begins without the checkpoint's {parts}"]


def _missing_rows(start: Start, job_config) -> list[str]:
    """Return lines for the user if the metrics of a run that resumes have gaps."""
    folder = Path(job_config.job.dump_folder)
    if start.step == 0 or start.checkpoint.parent != folder / job_config.checkpoint.folder or not _is_first():
        return []
    return missing_rows(folder / METRICS_FILE, start.step, job_config.metrics.log_freq)


def _other_versions(start: Start) -> list[str]:
    """Return a line for the user if the checkpoint of a run that goes on was saved with other versions."""
    if start.step == 0:
        return []
    before, now = read_manifest(start.checkpoint).versions, package_versions()
    changed = [f"{name} {before[name]} to {now[name]}" for name in now if name in before and before[name] != now[name]]
    return [f"since this checkpoint versions have changed: {', '.join(changed)}"] if changed else []


def _manifest(job_config, dataloader) -> Manifest:
    """Return what the manifests of all checkpoints of a run have in common."""
    return Manifest(
        step=0,
        holds_trainer=False,
        files={},
        settings=resolved_settings(job_config),
        defaults=kept_defaults(settings_of(job_config).known),
        versions=package_versions(),
        tokenizer_sha256=getattr(dataloader, "tokenizer_sha256", None),  # a model of the user's may have its own loader
        processes=torch.distributed.get_world_size(),
    )


def _is_first() -> bool:
    return os.environ.get("RANK", "0") == "0"


def _write_resolved_config(job_config) -> None:
    path = Path(job_config.job.dump_folder) / CONFIG_FILE
    settings = resolved_settings(job_config)
    if (name := _own_folder(path)) is not None:
        settings.setdefault("job", {})["dump_folder"] = name  # the command that started with this file resumes
    with terminal.go_on_without(path):
        dump_config(settings, path)


def _own_folder(config: Path) -> str | None:
    """Return the folder that a config names, if it lies in this folder: not in a copy of it, and it was not moved."""
    try:
        name = load_config(config)["job"]["dump_folder"]
        return name if require_folder(name).samefile(config.parent) else None
    except (ConfigError, LookupError, TypeError, OSError):  # no such file, no such setting, or a folder that is gone
        return None


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
    if "LOCAL_RANK" not in os.environ:
        raise ConfigError(
            "-m mxtrain.train is for torchrun: torchrun --nproc_per_node=1 -m mxtrain.train, or mxtrain train"
        )
    folder = require_folder(job_config.job.dump_folder)
    job_config.job.dump_folder = str(folder)
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    settings = settings_of(job_config)
    check_machine(settings, Machine(processes, torch.cuda.is_available()))
    check_model_layout(settings, torch.cuda.is_available())
    _require_backend(job_config.compile)
    with locked(folder) if _is_first() else nullcontext() as warning:
        # Every rank looks. Nothing changes in the folder before all ranks have met in the process group.
        start = find_start(folder, CheckpointSettings.of(job_config.checkpoint), processes)
        check_resume(start, settings, processes)
        terminal.start(folder, verbose)
        if warning:
            logger.warning(warning)
        try:
            stop = _train(job_config)
        except NonFiniteError as error:
            if _is_first():
                terminal.Screen().line(closing_summary(folder))
            torch.distributed.barrier()  # all ranks are here, and torchrun stops the others when one ends
            raise NonFiniteError(f"{error}; training stops. {_ways_out(job_config)}", error.step, error.loss) from error
        if stop is not None:
            terminal.note(stop.describe(folder, CheckpointSettings.of(job_config.checkpoint)))
        if _is_first() and not job_config.checkpoint.create_seed_checkpoint:
            terminal.Screen().line(closing_summary(folder))
        if _is_first() and stop is not None:
            report_stop(stop.signal)


def _require_backend(settings) -> None:
    """Raise ConfigError for a backend that PyTorch would not find when it compiles the first block."""
    if settings.enable and settings.backend not in torch._dynamo.list_backends(exclude_tags=()):
        raise ConfigError(
            f"compile.backend = {settings.backend!r} is not known to torch.compile: allowed are 'inductor', "
            "'aot_eager', and what else torch._dynamo.list_backends(exclude_tags=()) names"
        )


def _train(job_config) -> Stop | None:
    """Train, and return which signal stopped it, or None if it came to its end."""
    trainer = None
    # Converters see that this trainer sets the step before every forward.
    set_rounding_step(0)
    try:
        trainer = _Trainer(job_config)
        if _is_first() and not (Path(job_config.job.dump_folder) / CONFIG_FILE).exists():
            _write_resolved_config(job_config)
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
        search_beside(config_file(args))
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
