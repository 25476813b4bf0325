"""Make known to TorchTitan 0.2.2: converters, and its models with mxtrain's flavors, data, metrics and checks."""

import functools
from dataclasses import replace

import torch
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing as build_balancing_optimizers
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.deepseek_v3 import get_train_spec as deepseek_v3_spec
from torchtitan.models.llama3 import get_train_spec as llama3_spec
from torchtitan.models.llama4 import get_train_spec as llama4_spec
from torchtitan.models.moe import kernels, utils
from torchtitan.models.qwen3 import get_train_spec as qwen3_spec
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from mxtrain.conversion.converters import CONVERTERS
from mxtrain.titan.converters import titan_converter
from mxtrain.titan.data import build_dataloader, build_tokenizer
from mxtrain.titan.metrics import build_metrics_processor
from mxtrain.titan.v02.models.llama3 import Llama3, Llama3Adapter
from mxtrain.titan.v02.models.model_args import EXTRA_FLAVORS, Flavors
from mxtrain.titan.v02.parallelize import checked_parallelize, checked_pipeline
from mxtrain.titan.v02.repairs.cpu_attention import use_gathered_attention
from mxtrain.titan.v02.repairs.cpu_histc import histc
from mxtrain.titan.v02.validator import build_validator


def register() -> None:
    """Register all converters, and mxtrain's version of every supported model, which TorchTitan prefers to its own.

    On a CPU, mixtures count tokens as integers, expert parallelism orders them without Triton, and context parallelism
    gathers keys and values.
    """
    if not torch.cuda.is_available():
        utils.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
        torch.histc = histc
        use_gathered_attention()
    for name in CONVERTERS:
        register_model_converter(functools.partial(titan_converter, name), name)
    specs = {
        "llama3": replace(llama3_spec(), model_cls=Llama3, state_dict_adapter=Llama3Adapter),
        "llama4": llama4_spec(),
        # TorchTitan 0.2.2 sets no pipelining_fn for Qwen3. The one for Llama works: parts have the same names, and
        # Qwen3's forward skips the parts that a stage lacks. Its optimizer does not balance the load of experts either.
        "qwen3": replace(qwen3_spec(), pipelining_fn=pipeline_llm, build_optimizers_fn=build_balancing_optimizers),
        "deepseek_v3": deepseek_v3_spec(),
    }
    for name, spec in specs.items():
        flavors = {**spec.model_args, **EXTRA_FLAVORS.get(name, {})}
        register_train_spec(name, _with_mxtrain(name, replace(spec, model_args=flavors)))


def with_mxtrain(spec: TrainSpec) -> TrainSpec:
    """Return a model's spec with mxtrain's data, tokenizer, validation, metrics and checks of the layout.

    ``data.vocab_size`` then sets the model's vocabulary. A spec without it trains, too, with its own data and logs.

    Args:
        spec: of TorchTitan's models, or of a user's own, whose arguments are a dataclass with ``vocab_size``.
    """
    return _with_mxtrain(None, spec)


def _with_mxtrain(model: str | None, spec: TrainSpec) -> TrainSpec:
    return replace(
        spec,
        model_args=Flavors(model, spec.model_args),
        parallelize_fn=checked_parallelize(spec.parallelize_fn),
        pipelining_fn=spec.pipelining_fn and checked_pipeline(spec.pipelining_fn),
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
    )
