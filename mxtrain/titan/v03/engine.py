"""What the rest of mxtrain uses of TorchTitan 0.3, and ``with_mxtrain`` for models that its own trainer trains."""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch
import torch.nn as nn
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config.configs import ParallelismConfig
from torchtitan.protocols import BaseModel
from torchtitan.protocols.model_spec import ModelSpec

from mxtrain.conversion.converters import CONVERTERS
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.settings.fields import Problems, Settings
from mxtrain.settings.mxnorm_section import diagnostics_every, quantizing_among
from mxtrain.settings.read import settings_in
from mxtrain.settings.titan import known_fields
from mxtrain.titan.converters import active_settings
from mxtrain.titan.metrics import require_plain_recipes
from mxtrain.titan.v03.config import same, trainer_config
from mxtrain.titan.v03.models import DEFAULTS, FLAVORS, MODELS, config_of, model_spec, sizes_of
from mxtrain.titan.v03.parallelize import HAS_BATCHES, additions, converting, name_in_022, parallelized, with_converters
from mxtrain.titan.v03.parallelize import convertible as convertible
from mxtrain.titan.v03.trainer import Trainer as Trainer

saved_name = name_in_022


def example_inputs(model: nn.Module) -> tuple:
    return (torch.zeros((1, 32) if HAS_BATCHES else 32, dtype=torch.long),)


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
    """See ``Engine``."""

    name: str
    sizes: dict[str, object]

    @staticmethod
    def flavors(name: str) -> list[str]:
        return list(FLAVORS.get(name, ()))

    @classmethod
    def of_flavor(
        cls, name: str, flavor: str, given: Mapping[str, object] = {}, vocab_size: int = 0, seq_len: int = 2048
    ) -> "SizedModel":
        sizes = {**DEFAULTS[name], **FLAVORS[name][flavor], **given, "seq_len": seq_len}
        return cls(name, sizes | ({"vocab_size": vocab_size} if vocab_size else {}))

    @classmethod
    def of_job(cls, job_config) -> "SizedModel":
        return cls(job_config.model.name, sizes_of(job_config))

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return config_of(self.name, self.sizes).build()

    def adapter(self):
        return MODELS[self.name][-1](config_of(self.name, self.sizes), None)


def with_mxtrain(spec: ModelSpec, converters: Sequence[str] = ("mxnorm",), **tables: Mapping[str, object]) -> ModelSpec:
    """Return a spec whose model is converted by mxtrain as soon as the model is built.

    In a config registry, before ``--config llama3_mxnorm``::

        def llama3_mxnorm() -> Trainer.Config:
            config = llama3_debugmodel()
            config.model_spec = with_mxtrain(config.model_spec, mxnorm={"recipe": "nvfp4", "p": 1})
            return config

    Converted layers work with tensor parallelism, FSDP and selective activation checkpointing. Initial weights are the
    same on every layout. Schedule and diagnostics need mxtrain's trainer and are refused.

    Args:
        spec: of any model with linears and norms of ``torchtitan.models.common``. The spec does not change.
        converters: names as in ``model.converters``.
        tables: settings of the converters, as in the TOML tables of these names.

    Raises:
        ConfigError: for an unknown or wrong setting. When the model is built: for nothing to convert. When the model is
            parallelized: for DTensors, or a pipeline schedule that computes gradients of inputs and weights separately.
    """
    job_config = _job_config(spec.name, spec.flavor, converters, tables)
    theirs, spec = spec.parallelize_fn, with_converters(replace(spec), job_config)

    def with_given_configs(model: nn.Module, *, training, parallelism, **others) -> nn.Module:
        _check_layout(parallelism)
        parallelize = parallelized(theirs, replace(job_config, training=training))
        return parallelize(model, training=training, parallelism=parallelism, **others)

    return replace(spec, parallelize_fn=with_given_configs)


def override_with_mxtrain(
    config: BaseModel.Config, converters: Sequence[str] = ("mxnorm",), **tables: Mapping[str, object]
) -> BaseModel.Config:
    """Let the model of a config be converted by mxtrain as soon as it is built, for TorchTitan's registry of overrides.

    In a module, before ``--override.imports my_module.mxnorm``::

        @override(target=BaseModel.Config)
        def mxnorm(config, **settings):
            return override_with_mxtrain(config, mxnorm=settings)

    This does what ``with_mxtrain`` does, without pipelines.

    Args:
        config: the config of the whole model. It changes, and is returned, because TorchTitan builds the config that it
            had before the overrides.
        converters, tables: as for ``with_mxtrain``.

    Raises:
        ConfigError: as for ``with_mxtrain``. When the model is parallelized: for a pipeline.
    """
    job_config = _job_config(type(config).__qualname__, "", converters, tables)
    kind = converting(type(config), job_config)

    class Config(kind):
        __slots__ = ()  # so that an instance of the parent's class can become one of this class

        def build(self, **kwargs) -> nn.Module:
            model, context = kind.build(self, **kwargs), ExitStack()

            def parallelize(parallel_dims) -> None:
                if parallel_dims.pp_enabled:
                    raise ConfigError("parallelism.pipeline_parallel_degree needs with_mxtrain in a config registry")
                require_one_of("parallelism.spmd_backend", parallel_dims.spmd_backend, ["spmd_types"])
                context.enter_context(additions(model, parallel_dims, job_config))
                type(model).parallelize(model, parallel_dims)
                model.init_weights = init_weights

            def init_weights(**kwargs) -> None:  # which TorchTitan calls next after its parallelize function
                del model.init_weights
                context.close()
                model.init_weights(**kwargs)

            model.parallelize = parallelize
            return model

    config.__class__ = Config
    return config


def _job_config(name: str, flavor: str, converters: Sequence[str], tables: Mapping[str, Mapping[str, object]]):
    for converter in converters:
        require_one_of("model.converters", converter, CONVERTERS)
    sections = ["mxnorm" if quantizing_among([converter]) else converter for converter in converters]
    for table in tables:
        require_one_of("with_mxtrain: table", table, sections)
    model = {"name": name, "flavor": flavor, "converters": list(converters)}
    job_config = settings_in({"model": model, **tables}, known_fields()).values
    active_settings(job_config)
    require_plain_recipes(job_config)
    if every := diagnostics_every(job_config.mxnorm):
        raise ConfigError(f"mxnorm.diagnostics.every = {every} needs mxtrain's trainer; set it to 0")
    return job_config


def _check_layout(parallelism: ParallelismConfig) -> None:
    # Layers take plain tensors. "partial_dtensor" gives DTensors under tensor parallelism only.
    plain = ["spmd_types"] if parallelism.tensor_parallel_degree > 1 else ["spmd_types", "partial_dtensor"]
    require_one_of("parallelism.spmd_backend", parallelism.spmd_backend, plain)
    if parallelism.pipeline_parallel_degree > 1:
        for name in ("parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"):
            require_one_of(name, getattr(parallelism, name.rpartition(".")[2]), known_fields()[name].choices)
