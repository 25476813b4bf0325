"""Mistakes in a layout that take the model's sizes to see: heads, layers, experts, attention.

Sizes come from the model's flavor and from ``[model_args]``, before the model is built. ``mxtrain.settings.layout`` has
the mistakes that show without the model, ``mxtrain.titan.parallel.tensor_parallel`` those of single linears.
"""

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.settings.fields import Settings
from mxtrain.settings.layout import degree, parts_problem
from mxtrain.settings.model_settings import given_model_args
from mxtrain.titan.models.llama3 import is_tied
from mxtrain.titan.parallel.pipeline import FINDS_SHAPES_AGAIN


def check_model_layout(settings: Settings, has_gpus: bool) -> None:
    """Raise ConfigError for degrees of parallelism that the flavor of a model does not allow, with or without GPUs."""
    name, flavor = settings["model.name"], settings["model.flavor"]
    args = get_train_spec(name).model_args[flavor]
    if getattr(args, "takes_model_args", False):
        args.set_model_args(given_model_args(settings))
    model = f"{name} {flavor}"
    _check_attention(settings, args, model, has_gpus)
    _check_heads(settings, args, model)
    _check_stages(settings, args, model)
    _check_experts(settings, args, model)


def _refuse(settings: Settings, setting: str, problem: str) -> None:
    raise ConfigError(f"parallelism.{setting} = {settings[f'parallelism.{setting}']!r} {problem}")


def _check_attention(settings: Settings, args, model: str, has_gpus: bool) -> None:
    if degree(settings, "context") == 1:
        return
    attention = getattr(args, "attn_type", "sdpa")
    # In TorchTitan 0.2.2 Llama 3 alone has flex attention under context parallelism; PyTorch has it for GPUs.
    allowed = ["sdpa"]
    if settings["model.name"] == "llama3" and has_gpus:
        allowed.append("flex")
    if attention not in allowed:
        _refuse(
            settings,
            "context_parallel_degree",
            f"works with attention {' or '.join(allowed)}, and {model} has {attention!r}: allowed is 1",
        )
    if settings["parallelism.context_parallel_load_balancer"] == "ptrr" and attention == "sdpa":
        _refuse(
            settings,
            "context_parallel_load_balancer",
            f"needs flex attention, and {model} has 'sdpa': allowed is 'headtail'",
        )


def _check_heads(settings: Settings, args, model: str) -> None:
    tensor = degree(settings, "tensor")
    heads = {"heads": getattr(args, "n_heads", None), "key-value heads": getattr(args, "n_kv_heads", None)}
    for kind, number in heads.items():
        if number and number % tensor:
            _refuse(settings, "tensor_parallel_degree", f"does not divide the {number} {kind} of {model}")


def _check_stages(settings: Settings, args, model: str) -> None:
    """Refuse a model that cannot be divided into stages, and stages that would make another model."""
    if degree(settings, "pipeline") == 1:
        return
    if get_train_spec(settings["model.name"]).pipelining_fn is None:
        _refuse(settings, "pipeline_parallel_degree", f"does not work with {model}: allowed is 1")
    if is_tied(args):
        _refuse(
            settings,
            "pipeline_parallel_degree",
            f"separates the embedding of {model} from the head, which has the same weight: allowed is 1",
        )
    if problem := parts_problem(settings, args.n_layers):
        _refuse(settings, "module_fqns_per_model_part", problem)
    if FINDS_SHAPES_AGAIN or not settings["validation.enable"]:
        return
    for name in ("local_batch_size", "seq_len"):
        value, in_training = settings[f"validation.{name}"], settings[f"training.{name}"]
        if value != in_training:
            raise ConfigError(
                f"validation.{name} = {value} differs from training.{name}: a pipeline in PyTorch {torch.__version__} "
                f"allows only {in_training}"
            )


def _check_experts(settings: Settings, args, model: str) -> None:
    if degree(settings, "expert") == 1:
        return
    has_experts = getattr(args, "moe_enabled", hasattr(args, "moe_args"))
    experts = args.moe_args.num_experts if has_experts else 0
    if not experts:
        _refuse(settings, "expert_parallel_degree", f"needs experts, which {model} does not have: allowed is 1")
    if experts % degree(settings, "expert"):
        _refuse(settings, "expert_parallel_degree", f"does not divide the {experts} experts of {model}")
