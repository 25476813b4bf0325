"""TorchTitan 0.3's trainer with what ``TrainingRun`` adds."""

from functools import partial
from traceback import walk_tb
from types import SimpleNamespace

import torch.nn as nn
import torchtitan.trainer as titan
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.validate import Validator
from torchtitan.distributed.pipeline_parallel import pipeline_llm

from mxtrain.checkpoints.checkpointer import Checkpointer
from mxtrain.settings.read import import_own
from mxtrain.titan.data import build_dataloader, build_tokenizer, build_validation_loader
from mxtrain.titan.layouts import build_pipeline
from mxtrain.titan.metrics import build_metrics_processor
from mxtrain.titan.training_run import TrainingRun
from mxtrain.titan.v03.config import trainer_config
from mxtrain.titan.v03.models import model_spec
from mxtrain.titan.v03.parallelize import name_in_022, with_converters


class LoggingTrainer(titan.Trainer):
    """TorchTitan's trainer, which also logs a loss that is not finite. ``LossWatch`` stops at it, or goes on."""

    def train_step(self, data_iterator):
        try:
            super().train_step(data_iterator)
        except RuntimeError as error:
            if not str(error).startswith("Loss is not finite"):
                raise
            # TorchTitan raises with the step done, right before it logs these numbers, which it keeps nowhere else.
            done = [frame for frame, _ in walk_tb(error.__traceback__)][-1].f_locals
            self.metrics_processor.log(
                self.step,
                done["global_avg_loss"],
                done["global_max_loss"],
                float(done["grad_norm"].item()),
                extra_metrics={"n_tokens_seen": done["global_ntokens_seen"], **done["lr_metrics"]},
            )


class Trainer(TrainingRun, LoggingTrainer):
    """See ``TrainingRun``."""

    def _build(self) -> None:
        if own := self.job_config.experimental.custom_import:
            import_own("experimental.custom_import", own)
        spec = with_converters(model_spec(self.job_config), self.job_config)
        spec.pipelining_fn = _with_shared_loss
        titan.Trainer.__init__(self, trainer_config(self.job_config, spec, self._parts()))
        for optimizer in self.optimizers:
            (group,) = optimizer.param_groups  # settings that a checkpoint does not replace
            optimizer.defaults |= {name: group[name] for name in optimizer.defaults} | {"lr": group["initial_lr"]}
        schedule = self.lr_schedulers.schedulers[0]
        self.lr_schedulers.get_metrics = lambda: {"lr": schedule.get_last_lr()[0]}

    def batch_generator(self, data_iterable):
        """Yield microbatches of a pipeline, and whole batches without one."""
        batches = super().batch_generator(data_iterable)
        settings, has_stages = self.job_config.parallelism, self.parallel_dims.pp_enabled
        return iter(_Rows(batches, settings.pipeline_parallel_microbatch_size)) if has_stages else batches

    def _parts(self) -> dict:
        job_config = self.job_config

        def checkpoint(optimizers, lr_schedulers, **parts):
            # Of what the first scheduler saves, 0.3 restores the number of steps.
            save, load = lr_schedulers.schedulers[0].state_dict, lr_schedulers.load_state_dict
            schedule = SimpleNamespace(state_dict=save, load_state_dict=load)
            states = {"optimizers": _optimizer_states(optimizers), "lr_schedulers": schedule}
            return Checkpointer(self, checkpoint_config=job_config.checkpoint, **states, **parts)

        def dataloader(dp_world_size, dp_rank, tokenizer, **_):
            return build_dataloader(dp_world_size, dp_rank, tokenizer, job_config)

        return {
            "metrics": lambda parallel_dims, **_: build_metrics_processor(job_config, parallel_dims),
            "tokenizer": lambda **_: build_tokenizer(job_config),
            "dataloader": dataloader,
            "checkpoint": checkpoint,
            "validator": partial(HeldOutValidator, job_config),
        }


def _with_shared_loss(model: nn.Module, *, parallel_dims, device, **others) -> tuple:
    build = partial(pipeline_llm, model, parallel_dims=parallel_dims, device=device, **others)
    return build_pipeline(build, parallel_dims, device)


class HeldOutValidator(Validator):
    """TorchTitan's validator over mxtrain's held-out text."""

    def __init__(self, job_config, *, dp_world_size, dp_rank, tokenizer, **parts):
        loader = build_validation_loader(job_config, tokenizer, (dp_rank, dp_world_size))
        self.config, self.tokenizer = job_config.validation, tokenizer
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        vars(self).update(parts)
        # TorchTitan would take the batch size of training. A pipeline has as many chunks of a batch as there.
        chunk, stages = self.parallelism.pipeline_parallel_microbatch_size, self.parallel_dims.pp_enabled
        rows = self.config.local_batch_size // (self.local_batch_size // chunk if stages else 1)
        self.dl_config = SimpleNamespace(build=lambda **_: _Rows(loader, rows))


class _Rows:
    """The batches of a loader in parts of so many rows."""

    def __init__(self, loader, rows: int):
        self._loader, self._rows = loader, rows

    def __iter__(self):
        for inputs, labels in self._loader:
            for i in range(0, len(labels), self._rows):
                part = slice(i, i + self._rows)
                yield {name: value[part] for name, value in inputs.items()}, labels[part]


# States are saved as 0.2.2 saves them, so that each release resumes from checkpoints of the other.


def _optimizer_states(optimizers: OptimizersContainer) -> Stateful:
    """Moments and settings of every parameter by its name in 0.2.2: "state.layers.0.attention.wq.weight.exp_avg"."""

    def state_dict() -> dict:
        return {_renamed(key): value for key, value in optimizers.state_dict().items()}

    def load_state_dict(state: dict) -> None:
        optimizers.load_state_dict({key: state[_renamed(key)] for key in optimizers.state_dict()})

    return SimpleNamespace(state_dict=state_dict, load_state_dict=load_state_dict)


def _renamed(key: str) -> str:
    kind, _, rest = key.partition(".")
    name, _, last = rest.rpartition(".")
    return f"{kind}.{name_in_022(name)}.{last}"
