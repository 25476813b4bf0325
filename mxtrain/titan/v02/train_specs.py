"""Make known to TorchTitan 0.2.2: converters, and its models with mxtrain's flavors, data, metrics and checks."""

import functools
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import torch
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.components.optimizer import build_optimizers_with_moe_load_balancing as build_balancing_optimizers
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.components.validate import BaseValidator, Validator
from torchtitan.distributed.pipeline_parallel import pipeline_llm
from torchtitan.models.deepseek_v3 import get_train_spec as deepseek_v3_spec
from torchtitan.models.llama3 import get_train_spec as llama3_spec
from torchtitan.models.llama4 import get_train_spec as llama4_spec
from torchtitan.models.moe import kernels, utils
from torchtitan.models.qwen3 import get_train_spec as qwen3_spec
from torchtitan.models.qwen3.model.model import Qwen3Model
from torchtitan.protocols.model_converter import register_model_converter
from torchtitan.protocols.train_spec import TrainSpec, register_train_spec

from mxtrain.conversion.converters import CONVERTERS
from mxtrain.data.loader import Loader
from mxtrain.titan.converters import titan_converter
from mxtrain.titan.data import build_dataloader, build_tokenizer, build_validation_loader
from mxtrain.titan.metrics import build_metrics_processor
from mxtrain.titan.muon import NAME, give_matrices_to_muon
from mxtrain.titan.v02.models import Flavors, Llama3, Llama3Adapter
from mxtrain.titan.v02.parallelize import checked_parallelize, checked_pipeline


def register() -> None:
    """Register all converters, and mxtrain's version of every supported model, which TorchTitan prefers to its own.

    On a CPU, mixtures count tokens as integers, and expert parallelism orders them without Triton.
    """
    if not torch.cuda.is_available():
        utils.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)
        torch.histc = histc
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
        register_train_spec(name, replace(with_mxtrain(spec), model_args=Flavors(name, spec.model_args)))


def with_mxtrain(spec: TrainSpec) -> TrainSpec:
    """Return a model's spec with mxtrain's data, tokenizer, validation, metrics and checks of the layout.

    ``data.vocab_size`` then sets the model's vocabulary. A spec without mxtrain trains with its own data and logs, but
    not in a pipeline.

    Args:
        spec: of a model of TorchTitan or of the user. Its arguments are a dataclass with ``vocab_size``.
    """
    return replace(
        spec,
        model_args=Flavors(None, spec.model_args),
        parallelize_fn=checked_parallelize(spec.parallelize_fn),
        pipelining_fn=spec.pipelining_fn and checked_pipeline(spec.pipelining_fn),
        build_optimizers_fn=functools.partial(build_optimizers, spec.build_optimizers_fn),
        build_dataloader_fn=build_dataloader,
        build_tokenizer_fn=build_tokenizer,
        build_validator_fn=build_validator,
        build_metrics_processor_fn=build_metrics_processor,
    )


def build_optimizers(build: Callable, model_parts, optimizer_config, *others) -> OptimizersContainer:
    """Return what a model's ``build_optimizers_fn`` does. "Muon" starts from its AdamW."""
    if optimizer_config.name != NAME:
        return build(model_parts, optimizer_config, *others)
    optimizers = build(model_parts, replace(optimizer_config, name="AdamW"), *others)
    give_matrices_to_muon(optimizers)
    return optimizers


def build_validator(
    job_config, dp_world_size: int, dp_rank: int, tokenizer: HuggingFaceTokenizer, **parts
) -> BaseValidator:
    """Return a validator over held-out text. Takes the arguments of TorchTitan's ``build_validator``."""
    loss_fn, cp = parts["loss_fn"], parts["parallel_dims"].cp
    # Fault: see ``Trainer.batch_generator``. The validator counts the tokens of one part, and adds up all losses.
    parts["loss_fn"] = lambda predictions, labels: loss_fn(predictions, labels) / cp
    loader = build_validation_loader(job_config, tokenizer, (dp_rank, dp_world_size))
    return LoaderValidator(job_config, loader, tokenizer=tokenizer, **parts)


class LoaderValidator(Validator):
    """TorchTitan's Validator over a given loader, with the attributes that TorchTitan's ``__init__`` stores."""

    def __init__(self, job_config, loader: Loader, **parts):
        BaseValidator.__init__(self, job_config)
        self.validation_dataloader = loader
        self.pp_schedule = self.pp_has_first_stage = self.pp_has_last_stage = None
        vars(self).update(parts)

    def post_dataloading_process(self, input_dict, labels, model_parts):
        # DeepSeek V3 and Llama 4 make a mask for every attention, and then their "sdpa" attention refuses the mask.
        args = getattr(model_parts[0], "model_args", None)
        if getattr(args, "attn_type", "sdpa") not in ("flex", "varlen"):
            model_parts = [SimpleNamespace(get_attention_masks=None)]  # the validator expects the TypeError of a call
        return super().post_dataloading_process(input_dict, labels, model_parts)


if not hasattr(Qwen3Model, "freqs_cis"):
    # TorchTitan's validator reads it from every model under context parallelism, and makes no use of it.
    Qwen3Model.freqs_cis = property(lambda model: model.rope_cache)


# Fault: mixtures of experts count tokens as integers, which PyTorch does on CUDA only. 0.3.0 counts in another way.

_histc = torch.histc


def histc(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """``torch.histc`` that also counts integers below 2^24 on a CPU. As on CUDA, counts have the dtype of ``x``."""
    if x.is_floating_point() or x.is_cuda:
        return _histc(x, *args, **kwargs)
    return _histc(x.float(), *args, **kwargs).to(x.dtype)
