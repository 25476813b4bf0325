"""Checks of a layout that need the model's sizes: heads, layers, experts, attention.

Sizes come from the model's flavor and from ``[model_args]``, before the model is built. ``mxtrain.settings.layout`` has
the checks that need no model, ``mxtrain.titan.parallel.tensor_parallel`` those of single linears.
"""

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.layout import degree, parts_problem
from mxtrain.settings.model_settings import given_model_args
from mxtrain.titan.models.llama3 import is_tied
from mxtrain.titan.parallel.pipeline import FINDS_SHAPES_AGAIN

TENSOR, PIPELINE, CONTEXT, EXPERT = (
    f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context", "expert")
)


def check_model_layout(settings: Settings, has_gpus: bool) -> None:
    """Raise ConfigError for degrees of parallelism that the flavor of a model does not allow, with or without GPUs."""
    args = get_train_spec(settings["model.name"]).model_args[settings["model.flavor"]]
    if getattr(args, "takes_model_args", False):
        args.set_model_args(given_model_args(settings))
    raise_first(_problems(settings, args, has_gpus), settings)


def _problems(settings: Settings, args, has_gpus: bool) -> Problems:
    name = settings["model.name"]
    model = f"{name} {settings['model.flavor']}"
    if degree(settings, "context") > 1:
        attention = getattr(args, "attn_type", "sdpa")
        # In TorchTitan 0.2.2 Llama 3 alone has flex attention under context parallelism; PyTorch has it for GPUs.
        allowed = ["sdpa", "flex"] if name == "llama3" and has_gpus else ["sdpa"]
        if attention not in allowed:
            yield CONTEXT, f"works with attention {' or '.join(allowed)}, and {model} has {attention!r}: allowed is 1"
        balancer = "parallelism.context_parallel_load_balancer"
        if settings[balancer] == "ptrr" and attention == "sdpa":
            yield balancer, f"needs flex attention, and {model} has 'sdpa': allowed is 'headtail'"
    for kind, field in (("heads", "n_heads"), ("key-value heads", "n_kv_heads")):
        if (number := getattr(args, field, None)) and number % degree(settings, "tensor"):
            yield TENSOR, f"does not divide the {number} {kind} of {model}"
    if degree(settings, "pipeline") > 1:
        yield from _pipeline_problems(settings, args, model)
    if (experts := degree(settings, "expert")) > 1:
        number = args.moe_args.num_experts if getattr(args, "moe_enabled", hasattr(args, "moe_args")) else 0
        if not number:
            yield EXPERT, f"needs experts, which {model} does not have: allowed is 1"
        elif number % experts:
            yield EXPERT, f"does not divide the {number} experts of {model}"


def _pipeline_problems(settings: Settings, args, model: str) -> Problems:
    """A model that cannot be divided into stages, and stages that would make another model."""
    if get_train_spec(settings["model.name"]).pipelining_fn is None:
        yield PIPELINE, f"does not work with {model}: allowed is 1"
    if is_tied(args):
        apart = f"separates the embedding of {model} from the head, which has the same weight"
        yield PIPELINE, f"{apart}: allowed is 1"
    if problem := parts_problem(settings, args.n_layers):
        yield "parallelism.module_fqns_per_model_part", problem
    for name in ("local_batch_size", "seq_len"):
        allowed = settings[f"training.{name}"]
        if not FINDS_SHAPES_AGAIN and settings["validation.enable"] and settings[f"validation.{name}"] != allowed:
            only = f"a pipeline in PyTorch {torch.__version__} allows only {allowed}"
            yield f"validation.{name}", f"differs from training.{name}: {only}"
