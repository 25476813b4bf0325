"""What the rest of mxtrain uses of TorchTitan 0.3."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
import torch.nn as nn
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer

from mxtrain.conversion.converters import CONVERTERS
from mxtrain.settings.fields import Problems, Settings
from mxtrain.titan.v03.config import same, trainer_config
from mxtrain.titan.v03.models import DEFAULTS, FLAVORS, adapter_of, config_of, model_spec, sizes_of
from mxtrain.titan.v03.parallelize import convertible as convertible
from mxtrain.titan.v03.trainer import Trainer as Trainer
from mxtrain.titan.v03.with_mxtrain import with_mxtrain as with_mxtrain


def example_inputs(model: nn.Module) -> tuple:
    return (torch.zeros(1, 32, dtype=torch.long),)


def models() -> Iterable[str]:
    return FLAVORS


def converters() -> Iterable[str]:
    return CONVERTERS


def layout_problems(settings: Settings) -> Problems:
    if settings["parallelism.context_parallel_degree"] > 1:
        yield "parallelism.context_parallel_degree", "is not supported with TorchTitan 0.3: allowed is 1"


def build_on_meta(job_config) -> nn.Module:
    spec = model_spec(job_config)
    parts = dict.fromkeys(("metrics", "tokenizer", "dataloader", "checkpoint", "validator"))
    spec.model.update_from_config(config=trainer_config(job_config, spec, parts))  # says what tensor parallelism splits
    with torch.device("meta"):
        return spec.model.build()


def wandb_logger(folder, job_config) -> WandBLogger:
    return WandBLogger(str(folder), job_config.to_dict())


def metrics_processor(job_config, parallel_dims) -> MetricsProcessor:
    settings = same(MetricsProcessor.Config, job_config.metrics, enable_wandb=False)
    parallelism, folder = job_config.parallelism, job_config.job.dump_folder
    schedule = parallelism.pipeline_parallel_schedule
    return MetricsProcessor(settings, parallel_dims=parallel_dims, dump_folder=folder, pp_schedule=schedule)


def hugging_face_tokenizer(folder: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=folder)


def register() -> None:
    """Nothing: ``with_mxtrain`` and the trainer make mxtrain known."""


@dataclass(frozen=True)
class SizedModel:
    """A model with causal attention and without data.

    Attributes:
        name: TorchTitan's.
        sizes: by their names in ``[model_args]``, "vocab_size" and "seq_len"; "num_experts" only if it has any.
    """

    name: str
    sizes: dict[str, object]

    @staticmethod
    def flavors(name: str) -> list[str]:
        """The flavors of a model."""
        return list(FLAVORS.get(name, ()))

    @classmethod
    def of_flavor(
        cls, name: str, flavor: str, given: Mapping[str, object] = {}, vocab_size: int = 0, seq_len: int = 2048
    ) -> "SizedModel":
        """A flavor with settings of ``[model_args]``, this number of positions, and a vocabulary unless it is 0."""
        sizes = {**DEFAULTS[name], **FLAVORS[name][flavor], **given, "seq_len": seq_len}
        return cls(name, sizes | ({"vocab_size": vocab_size} if vocab_size else {}))

    @classmethod
    def of_job(cls, job_config) -> "SizedModel":
        """The model of a job."""
        return cls(job_config.model.name, sizes_of(job_config))

    def on_meta(self) -> nn.Module:
        """The model without converters on the meta device, fp32."""
        with torch.device("meta"):
            return config_of(self.name, self.sizes).build()

    def adapter(self):
        """TorchTitan's adapter, for one parameter at a time."""
        return adapter_of(self.name)(config_of(self.name, self.sizes), None)
