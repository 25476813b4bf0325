"""mxtrain's converters for a model of TorchTitan 0.3 that TorchTitan's own trainer trains."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch.nn as nn
from torchtitan.config.configs import ParallelismConfig
from torchtitan.distributed.activation_checkpoint import SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec

from mxtrain.conversion.converters import require_converter
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.settings.mxnorm_section import quantizing_among
from mxtrain.settings.read import settings_in
from mxtrain.settings.titan import known_fields
from mxtrain.titan.converters import active_settings
from mxtrain.titan.metrics import require_plain_recipes
from mxtrain.titan.v03.parallelize import parallelized, with_converters


def with_mxtrain(spec: ModelSpec, converters: Sequence[str] = ("mxnorm",), **tables: Mapping[str, object]) -> ModelSpec:
    """Return a spec whose model mxtrain's converters change as soon as it is built.

    In a config registry, before ``--config llama3_mxnorm``::

        def llama3_mxnorm() -> Trainer.Config:
            config = llama3_debugmodel()
            config.model_spec = with_mxtrain(config.model_spec, mxnorm={"recipe": "nvfp4", "p": 1})
            return config

    Converted layers know tensor parallelism, FSDP and selective activation checkpointing. Initial weights are the same
    on every layout. What needs mxtrain's trainer is refused: schedule and diagnostics.

    Args:
        spec: of any model; its linears and norms are those of ``torchtitan.models.common``. It does not change.
        converters: names as in ``model.converters``.
        tables: settings of the converters, as in the TOML tables of these names.

    Raises:
        ConfigError: for an unknown or wrong setting. When the model is built: it has nothing to convert. When it is
            parallelized: DTensors, or a pipeline's schedule that computes gradients of inputs and of weights apart.
    """
    for name in converters:
        require_converter("model.converters", name)
    sections = ["mxnorm" if quantizing_among([name]) else name for name in converters]
    for table in tables:
        require_one_of("with_mxtrain: table", table, sections)
    model = {"name": spec.name, "flavor": spec.flavor, "converters": list(converters)}
    job_config = settings_in({"model": model, **tables}, known_fields()).values
    active_settings(job_config)
    require_plain_recipes(job_config)
    if every := job_config.mxnorm.diagnostics.every:
        raise ConfigError(f"mxnorm.diagnostics.every = {every} needs mxtrain's trainer: allowed is 0")
    theirs, spec = spec.parallelize_fn, with_converters(replace(spec), job_config)

    def with_given_configs(model: nn.Module, *, training, parallelism, ac_config, **others) -> nn.Module:
        _check_layout(parallelism)
        mode = "selective" if isinstance(ac_config, SelectiveAC.Config) else "other"
        checkpointing = replace(job_config.activation_checkpoint, mode=mode)
        given = replace(job_config, training=training, activation_checkpoint=checkpointing)
        parallelize = parallelized(theirs, given)
        return parallelize(model, training=training, parallelism=parallelism, ac_config=ac_config, **others)

    return replace(spec, parallelize_fn=with_given_configs)


def _check_layout(parallelism: ParallelismConfig) -> None:
    # Layers take plain tensors. "partial_dtensor" gives DTensors under tensor parallelism only.
    plain = ["spmd_types"] if parallelism.tensor_parallel_degree > 1 else ["spmd_types", "partial_dtensor"]
    require_one_of("parallelism.spmd_backend", parallelism.spmd_backend, plain)
    if parallelism.pipeline_parallel_degree > 1:
        for name in ("parallelism.pipeline_parallel_schedule", "parallelism.pipeline_parallel_schedule_csv"):
            require_one_of(name, getattr(parallelism, name.rpartition(".")[2]), known_fields()[name].choices)
