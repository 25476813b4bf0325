"""Mistakes in a layout that take the model's sizes to see: heads, features, layers, experts, attention.

Sizes come from the model's flavor, and from one layer of it on the meta device, before the model is built.
``mxtrain.settings.layout`` has the mistakes that show without the model.
"""

import copy

import torch
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.errors import ConfigError
from mxtrain.settings.layout import BLOCK, degree
from mxtrain.settings.pipeline import stages_problem
from mxtrain.settings.relations import quantizing
from mxtrain.settings.values import Settings

# Linears that tensor parallelism shards along their output features, and along their input features.
BY_OUTPUT, BY_INPUT = ("wq", "wk", "wv", "w1", "w3"), ("wo", "w2")


def check_model_layout(settings: Settings) -> None:
    """Raise ConfigError for degrees of parallelism that the flavor of a model does not allow."""
    name, flavor = settings["model.name"], settings["model.flavor"]
    args = get_train_spec(name).model_args[flavor]
    model = f"{name} {flavor}"
    _check_attention(settings, args, model)
    _check_heads(settings, args, model)
    _check_features(settings, args, model)
    _check_stages(settings, args, model)
    _check_experts(settings, args, model)


def _refuse(settings: Settings, setting: str, problem: str) -> None:
    raise ConfigError(f"parallelism.{setting} = {settings[f'parallelism.{setting}']!r} {problem}")


def _check_attention(settings: Settings, args, model: str) -> None:
    if degree(settings, "context") == 1:
        return
    attention = getattr(args, "attn_type", "sdpa")
    # In TorchTitan 0.2.2 Llama 3 alone has flex attention under context parallelism; PyTorch has it for GPUs.
    allowed = ["sdpa"]
    if settings["model.name"] == "llama3" and torch.cuda.is_available():
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


def _check_features(settings: Settings, args, model: str) -> None:
    """Refuse shards of a linear that do not hold whole blocks: the scales of one process would not be theirs."""
    tensor, converters = degree(settings, "tensor"), quantizing(settings)
    if tensor == 1 or not converters:
        return
    for name, linear in _linears(settings, args):
        kind = name.rpartition(".")[2]
        features = linear.in_features if kind in BY_INPUT else linear.out_features
        if kind in (*BY_INPUT, *BY_OUTPUT) and features % (tensor * BLOCK):
            _refuse(
                settings,
                "tensor_parallel_degree",
                f"cuts the {features} features of {name} in {model} into shards of {features / tensor:g}: with "
                f"converter {converters[0]!r} a shard has a multiple of {BLOCK}",
            )


def _linears(settings: Settings, args):
    """Yield name and module of every linear in the first layer."""
    one_layer = copy.copy(args)
    one_layer.n_layers = 1
    with torch.device("meta"):
        model = get_train_spec(settings["model.name"]).model_cls(one_layer)
    for name, module in model.layers.named_modules(prefix="layers"):
        if isinstance(module, torch.nn.Linear):
            yield name, module


def _check_stages(settings: Settings, args, model: str) -> None:
    """Refuse a model that cannot be divided into stages, and stages that would make another model."""
    if degree(settings, "pipeline") == 1:
        return
    if get_train_spec(settings["model.name"]).pipelining_fn is None:
        _refuse(settings, "pipeline_parallel_degree", f"does not work with {model}: allowed is 1")
    if getattr(args, "enable_weight_tying", False):
        _refuse(
            settings,
            "pipeline_parallel_degree",
            f"separates the embedding of {model} from the head, which has the same weight: allowed is 1",
        )
    if problem := stages_problem(settings, args.n_layers):
        raise ConfigError(problem)


def _check_experts(settings: Settings, args, model: str) -> None:
    if degree(settings, "expert") == 1:
        return
    has_experts = getattr(args, "moe_enabled", hasattr(args, "moe_args"))
    experts = args.moe_args.num_experts if has_experts else 0
    if not experts:
        _refuse(settings, "expert_parallel_degree", f"needs experts, which {model} does not have: allowed is 1")
    if experts % degree(settings, "expert"):
        _refuse(settings, "expert_parallel_degree", f"does not divide the {experts} experts of {model}")
