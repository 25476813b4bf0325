"""What mxtrain adds to a trainer of TorchTitan: schedules, diagnostics, whole checkpoints, exact resumption."""

import copy
from collections.abc import Callable
from functools import partial
from itertools import chain
from pathlib import Path

import torch

from mxtrain.analysis.runs import NONFINITE
from mxtrain.checkpoints import terminal
from mxtrain.checkpoints.checkpointer import RANDOM_STATE
from mxtrain.checkpoints.ending import (
    STOP,
    LossWatch,
    NonFiniteError,
    Stop,
    StopSignals,
    describe,
    nonfinite,
    over_ranks,
)
from mxtrain.checkpoints.folder import Manifest, package_versions, set_aside
from mxtrain.checkpoints.run_folder import METRICS_FILE
from mxtrain.checkpoints.start import Start
from mxtrain.checkpoints.states import RandomState, TokenCount, apply_settings
from mxtrain.conversion.schedule import RecipeSwitch
from mxtrain.diagnostics.merge_guard import MergeGuard
from mxtrain.files import sync_file
from mxtrain.formats.hardware import MERGED
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.ranks import gather, is_first
from mxtrain.rng.rounding import set_rounding_step
from mxtrain.settings.fields import Settings
from mxtrain.settings.mxnorm_section import quantizing_among, schedule_in, without_effect
from mxtrain.settings.resume import kept_defaults
from mxtrain.titan.layouts import code_gather
from mxtrain.titan.metrics import log_event, log_loss, numerics_of
from mxtrain.titan.releases import engine
from mxtrain.titan.run_start import begin_run, require_same_settings, write_resolved_config


def _tell(log: Callable[[int, str], None], step: int, text: str) -> None:
    terminal.note(f"step {step}: {text}")
    log(step, text)


class TrainingRun:
    """A mixin for TorchTitan's trainer. It adds:

    - recipes by step, from the schedule, and the position of a step in the random sequence
    - weights cast once per step, if a step has several microbatches; or weights that FSDP gathers as codes
    - whole checkpoints with the states of random generators, the tokens of all ranks, and the optimizer's present
      settings (``Checkpointer`` calls this class's methods)
    - a check for losses, weights and optimizer states that are not finite; such states are never saved
    - the extra pass of a step with diagnostics (``mxtrain.diagnostics.recording``)
    - a stop of all ranks after the same step when any rank gets a stop signal; ``stop`` then describes it
    """

    stop: Stop | None = None
    _last_step = _validated = 0
    _looked_at: int | None = None

    def __init__(self, settings: Settings, find: Callable[[], Start], found: Start | None):
        """``find`` and ``found``: as for ``begin_run``."""
        self.settings, self._find, self.start = settings, find, found
        self.job_config = job_config = settings.values
        # debug.deterministic would fill new memory with NaN, all of which kernels overwrite: 0.80 instead of 0.90 of
        # the speed at 125M.
        torch.utils.deterministic.fill_uninitialized_memory = False
        self._build()
        self._watch = LossWatch(self.device, stops=job_config.metrics.on_nonfinite_loss == STOP)
        self.checkpointer.states[RANDOM_STATE] = RandomState()
        log = partial(log_event, self.metrics_processor)
        self._switch = RecipeSwitch(schedule_in(job_config), self.model_parts, log)
        mesh = self.parallel_dims.get_optional_mesh("loss")
        has_microbatches = self.gradient_accumulation_steps > 1 or self.parallel_dims.pp_enabled
        caches = job_config.mxnorm.cache_weights and has_microbatches
        self._ready = ReadyWeights(self.model_parts) if caches else None
        self._codes = code_gather(job_config, self.model_parts, self.parallel_dims)
        named = (item for part in self.model_parts for item in part.named_modules())
        coded = [self.saved_name(fqn) for fqn, module in named if getattr(module, "gathers_codes", False)]
        self._coded_layers = sorted({fqn for fqns in gather(coded) for fqn in fqns}) if self._codes else []
        self._tokens = TokenCount(mesh.size(), mesh.get_local_rank()) if mesh is not None else TokenCount(1, 0)
        self._signals = StopSignals()
        self._numerics = numerics_of(job_config, self.model_parts)
        merges = job_config.mxnorm.mode == MERGED and bool(quantizing_among(job_config.model.converters))
        of_guard = job_config.mxnorm.merge_limit, self.model_parts, engine().saved_name, partial(_tell, log)
        self._guard = MergeGuard(*of_guard) if merges else None
        # The stages of a pipeline have the same text, and draw other random bits because their layers differ.
        self._rank_in_stage = torch.distributed.get_rank() % (self.parallel_dims.world_size // self.parallel_dims.pp)
        if job_config.validation.enable:
            self.metrics_processor.log_validation = partial(self._log_validation, self.metrics_processor.log_validation)

    def _build(self) -> None:
        """Let TorchTitan's trainer build everything, with mxtrain's parts."""
        raise NotImplementedError

    def init_distributed(self):
        parallel_dims = super().init_distributed()
        # As soon as all ranks have met: what is built next looks into the run's folder, too.
        require_same_settings(self.settings)
        self.start = begin_run(self.job_config, self._find, self.start)
        for line in without_effect(self.job_config):
            terminal.note(line)
        return parallel_dims

    def train(self):
        try:
            super().train()
            # TorchTitan validates every validation.freq steps, which may leave out the last one.
            if self.job_config.validation.enable and not self.is_stopping() and self._validated < self._last_step:
                self.validator.validate(self.model_parts, self._last_step)
            self.may_save(self._last_step or self.step)  # which need not be saved, nor last where the text ends
        except NonFiniteError as error:
            self._log_end(error)
            self.checkpointer.finish()  # the last checkpoint, with finite weights, becomes complete
            raise
        finally:
            if self.stop is None:
                self._signals.restore()
        self.checkpointer.finish()

    def _log_end(self, error: NonFiniteError) -> None:
        """Log what ends the run, and its loss unless the row of this or the next step is logged.

        A comparison does not count such a run.
        """
        if error.what:
            log_event(self.metrics_processor, error.step, f"{error.what}{NONFINITE}")
        if error.loss is None or any(map(self.metrics_processor.should_log, {error.step, self._last_step})):
            return
        tokens = self._tokens.of_all_ranks(self.ntokens_seen)
        # A GPU has done the next step, too. Steps have as many tokens, unless a resumed run has changed that.
        log_loss(self.metrics_processor, error.step, error.loss, tokens * error.step // self._last_step)

    def should_continue_training(self) -> bool:
        if not super().should_continue_training():
            return False
        if not self.is_stopping():
            return True
        self._signals.ignore()
        self.stop = Stop(self._watch.stop_signal, self.step, is_saved=self.checkpointer.saved_step == self.step)
        return False

    def after_load(self) -> None:
        if self._guard is not None and self.start.checkpoint is not None:
            self._guard.restore(self.start.manifest.images)
        if is_first():
            # Only now: a run that was refused or failed before leaves the folder as it was.
            for path in self.start.abandoned:
                set_aside(path)
        if self.step >= self.job_config.training.steps:
            return  # nothing is left to train, and TorchTitan's schedule fails for steps after its end
        kept, present = apply_settings(self.optimizers, self.lr_schedulers)
        if self.step > 0 and kept != present:
            terminal.note(f"learning rate of step {self.step + 1}: {present:.4g} (was {kept:.4g})")
        if self.step > 0 and self.start.changes:
            # config.toml will have the new settings alone. One event, because wandb keeps one for each step.
            log_event(self.metrics_processor, self.step + 1, "; ".join(self.start.changes))

    def train_step(self, data_iterator):
        self._losses = []
        self._has_switched = self._switch.begin_step(self.step)
        super().train_step(data_iterator)
        if self._last_step == 0 and is_first():
            # Only now: a start that fails leaves an earlier one's settings.
            write_resolved_config(Path(self.job_config.job.dump_folder), self.settings)
        self._watch.record(self.step, self._losses, self._signals.received)
        self._last_step = self.step  # TorchTitan counts one more step where the text ends
        # A CPU has finished the step, and logging waited for the device.
        waited = self.device.type == "cpu" or self.metrics_processor.should_log(self.step)
        self._watch.look(at_last_step=waited)
        # Until the first step is done, which compiles the model, there is nothing to save, and a signal stops at once.
        self._signals.install()

    def forward_backward_step(self, **kwargs):
        if self._numerics is not None and not self._losses:
            # Layers that begin to merge are looked at before their first step.
            if self._numerics.is_due(self.step) or (self._guard is not None and self._has_switched):
                self._measure(**kwargs)
        set_rounding_step(self.step, microbatch=len(self._losses), rank=self._rank_in_stage)
        if self._ready is not None:
            self._ready.refresh()
        loss = self._forward_and_backward(**kwargs)
        self._losses.append(loss.detach())
        if len(self._losses) == self.gradient_accumulation_steps:
            if self._ready is not None:
                self._ready.drop()
            if self._codes is not None:
                self._codes.finish_gradients()
        return loss

    def _forward_and_backward(self, **kwargs) -> torch.Tensor:
        return super().forward_backward_step(**kwargs)

    def _measure(self, *, input_dict, labels, global_valid_tokens) -> None:
        if not self.parallel_dims.pp_enabled:  # whose schedule takes whole microbatches
            input_dict, labels = self._numerics.sample(input_dict, labels)
        set_rounding_step(self.step, rank=self._rank_in_stage)
        tokens = self.ntokens_seen
        with self._numerics.recording():
            self._forward_and_backward(
                input_dict=copy.copy(input_dict), labels=labels, global_valid_tokens=global_valid_tokens
            )
        self.ntokens_seen = tokens
        if figures := self._numerics.figures():
            self.metrics_processor.logger.log(figures, self.step)
        if self._guard is not None:
            self._guard.check(self.step, figures)

    def state_dict(self):
        return {**super().state_dict(), "ntokens_seen": self._tokens.of_all_ranks(self.ntokens_seen)}

    def load_state_dict(self, state_dict):
        super().load_state_dict({**state_dict, "ntokens_seen": self._tokens.share(state_dict["ntokens_seen"])})

    def saved_name(self, name: str) -> str:
        return engine().saved_name(name)

    def manifest(self, step: int, holds_trainer: bool) -> Manifest:
        return Manifest(
            step,
            holds_trainer,
            files={},
            settings=self.settings.resolved(),
            defaults=kept_defaults(self.settings.known),
            versions=package_versions(),
            processes=torch.distributed.get_world_size(),
            images=[] if self._guard is None else self._guard.images,
            codes=self._coded_layers,
        )

    def before_save(self) -> None:
        # After a power failure, a checkpoint without the rows before it would leave a gap in the run's curves.
        sync_file(Path(self.job_config.job.dump_folder) / METRICS_FILE)

    def is_stopping(self) -> bool:
        return self._watch.stop_signal is not None

    def may_save(self, step: int) -> bool:
        """Return whether weights and optimizer states after this step are finite. Stop or warn if not."""
        if self._looked_at == step:  # before it was validated, or before the end: one warning is enough
            return self._was_finite
        self._watch.look(at_last_step=True)
        # A loss says nothing about the weights after its step, nor about infinite second moments, which freeze weights.
        states = (state for optimizer in self.optimizers.optimizers for state in optimizer.state.values())
        tensors = (value for state in states for value in state.values() if torch.is_tensor(value) and value.ndim)
        weights = (tensor for part in self.model_parts for tensor in chain(part.parameters(), part.buffers()))
        found = nonfinite({"weights": weights, "optimizer states": tensors}, self.device)
        if found is not None:
            error = NonFiniteError(f"step {step}: the {found[0]} after this step hold {found[1]}", step, what=found[0])
            self._watch.end(error, "no checkpoint is saved")
        self._looked_at, self._was_finite = step, found is None
        return self._was_finite

    def _log_validation(self, log: Callable, loss: float, step: int, **more) -> None:
        """Log a validation. Stop or warn if its loss is not finite but the weights are."""
        log(loss, step, **more)
        self._validated = step
        found = describe(over_ranks(torch.tensor(loss, device=self.device)).tolist())
        if found and self.may_save(step):
            self._watch.end(NonFiniteError(f"step {step}: the validation loss is {found}", step))
