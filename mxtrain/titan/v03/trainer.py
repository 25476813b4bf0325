"""TorchTitan 0.3's trainer with what ``TrainingRun`` adds."""

import math
from functools import partial
from types import SimpleNamespace

import torchtitan.trainer as titan
from torchtitan.components.validate import Validator

from mxtrain.settings.model_settings import given_in
from mxtrain.titan.data import build_dataloader, build_tokenizer, build_validation_loader
from mxtrain.titan.metrics import build_metrics_processor
from mxtrain.titan.training_run import RunCheckpointer, TrainingRun
from mxtrain.titan.v03.config import trainer_config
from mxtrain.titan.v03.models import model_spec
from mxtrain.titan.v03.parallelize import with_converters

# The trainer stops at a loss that is not finite before it logs it. ``LossWatch`` does both, or goes on.
titan.math = SimpleNamespace(**{**vars(math), "isfinite": lambda loss: True})


class Trainer(TrainingRun, titan.Trainer):
    """See ``TrainingRun``."""

    def _build(self) -> None:
        titan.Trainer.__init__(self, trainer_config(self.job_config, _spec(self.job_config), self._parts()))

    def _parts(self) -> dict:
        job_config = self.job_config

        def checkpoint(sd_adapter, base_folder, **parts):
            return RunCheckpointer(
                checkpoint_config=job_config.checkpoint, sd_adapter=sd_adapter, base_folder=base_folder, **parts
            )

        def dataloader(dp_world_size, dp_rank, tokenizer, **_):
            return build_dataloader(dp_world_size, dp_rank, tokenizer, job_config)

        return {
            "metrics": lambda parallel_dims, **_: build_metrics_processor(job_config, parallel_dims),
            "tokenizer": lambda **_: build_tokenizer(job_config),
            "dataloader": dataloader,
            "checkpoint": checkpoint,
            "validator": partial(HeldOutValidator, job_config),
        }


class HeldOutValidator(Validator):
    """TorchTitan's validator over mxtrain's held-out text."""

    def __init__(self, job_config, *, dp_world_size, dp_rank, tokenizer, **parts):
        loader = build_validation_loader(job_config, tokenizer, (dp_rank, dp_world_size))
        self.config, self.tokenizer = job_config.validation, tokenizer
        self.dp_world_size, self.dp_rank = dp_world_size, dp_rank
        self.dl_config = SimpleNamespace(build=lambda **_: loader)
        vars(self).update(parts)


def _spec(job_config):
    given = given_in(job_config)
    if job_config.data.vocab_size > 0:
        given["vocab_size"] = job_config.data.vocab_size
    spec = model_spec(job_config.model.name, job_config.model.flavor, given)
    return with_converters(spec, job_config)
