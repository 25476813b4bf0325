"""What mxtrain adds to TorchTitan 0.3's models before and after they are parallelized."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache, partial
from types import MethodType
from unittest.mock import patch

import spmd_types as spmd
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torchtitan.config.configs import TrainingConfig
from torchtitan.distributed.parallel_dims import MeshAxisName
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.common.moe import GroupedExperts, MoE
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module

from mxtrain.checkpoints.terminal import show_line
from mxtrain.launch.pytorch import CheckpointWrapper
from mxtrain.nn.gathered_norm import SumGradient
from mxtrain.nn.mixture import of_whole_sequences
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.normed_input import NormedInput, RoutedRows
from mxtrain.nn.split import SplitSequences, by_input_features, by_output_features
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.parallel.activation_checkpoint import knows_own_operations
from mxtrain.parallel.expert_dispatch import SentRows
from mxtrain.parallel.initial_weights import plain_name
from mxtrain.parallel.tensor_parallel import check_part, check_part_of_experts, no_split
from mxtrain.titan.converters import titan_converter
from mxtrain.titan.layouts import finish_layout
from mxtrain.titan.metrics import describe_model
from mxtrain.titan.v03.config import same

TP = MeshAxisName.TP
HAS_BATCHES = hasattr(TrainingConfig, "seq_len")
"""Whether activations are [B, S, D]. In TorchTitan's main, they are [T, D]"""
TOKENS = spmd.S(1 if HAS_BATCHES else 0)
_RENAMED = (
    (re.compile(r"(^|\.)qkv_linear\.(w[qkv])\b"), r"\1\2"),
    (re.compile(r"^lm_head\b"), "output"),
    (re.compile(r"(^|\.)routed_experts\.inner_experts\b"), r"\1experts"),
    (re.compile(r"\.(w[123])_E(?:FD|DF)$"), r".\1"),
    (re.compile(r"\.(expert_bias|tokens_per_expert)_E$"), r".\1"),
)


def name_in_022(name: str) -> str:
    """The name in 0.2.2 of a module or parameter, without the names of modules that wrap others.

    Settings, random bits, reports and checkpoints have these names under 0.3, too.
    """
    name = plain_name(name)
    for pattern, replacement in _RENAMED:
        name = pattern.sub(replacement, name)
    return name


@contextmanager
def convertible(model: nn.Module) -> Iterator[None]:
    model.named_modules = MethodType(_named_modules, model)
    try:
        with plain_modules(model):
            yield
    finally:
        del model.named_modules


def _named_modules(model: nn.Module, *args, **kwargs) -> Iterator[tuple[str, nn.Module]]:
    for name, module in type(model).named_modules(model, *args, **kwargs):
        yield name_in_022(name), module


def with_converters(spec: ModelSpec, job_config) -> ModelSpec:
    """Return the spec of a model that is converted as soon as it is built, and gets mxtrain's additions."""
    spec.model = same(converting(type(spec.model), job_config), spec.model)
    spec.parallelize_fn = parallelized(spec.parallelize_fn, job_config)
    return spec


def converting(kind: type, job_config) -> type:
    """A class like ``kind``, that of a model's config, whose model is converted as soon as it is built."""

    class Config(kind):
        __slots__ = ()

        def build(self, **kwargs) -> nn.Module:
            for _, dispatcher, experts, name in self.traverse(AllToAllTokenDispatcher.Config):
                if type(dispatcher) is AllToAllTokenDispatcher.Config:
                    setattr(experts, name, same(CodesDispatcher.Config, dispatcher))
            model = kind.build(self, **kwargs)
            with convertible(model):
                for name in job_config.model.converters:
                    titan_converter(name, job_config).convert(model)
            return model

    return Config


def split_layers(model: nn.Module, mesh: DeviceMesh, has_expert_parallelism: bool) -> None:
    """Tell swapped layers which of their matrices the processes of ``mesh`` split, as TorchTitan's sharding says.

    With expert parallelism, a mixture keeps shards of the sequences, which its shared experts gather.
    """
    group, processes = mesh.get_group().group_name, mesh.size()
    sequences = SplitSequences(group, processes, mesh.get_local_rank())
    for fqn, module in model.named_modules():
        fqn = name_in_022(fqn)
        is_whole = module._sharding_config and module._sharding_config.in_src_shardings is None
        if isinstance(module, MXNorm) and not is_whole:
            if module._sharding_config.in_src_shardings["input"].per_axis_spmd_types()[TP] != TOKENS:
                raise no_split(fqn, module, "features", processes)
            if not (has_expert_parallelism and module.feeds_mixture):
                module.split, module.gathers_plain = sequences, False
        elif isinstance(module, QuantizedLinear):
            weight = module._sharding_config and module._sharding_config.state_shardings["weight"].axis_types[TP]
            if weight == spmd.R and is_whole:  # of latent attention, before a norm that every process has whole
                module.register_forward_hook(lambda _, inputs, y: SumGradient.apply(y, sequences.key))
                continue
            if weight not in (spmd.S(0), spmd.S(1)):
                raise no_split(fqn, module, "replicas", processes)
            by_output = weight == spmd.S(0)
            module.split = by_output_features(group) if by_output else by_input_features(group)
            check_part(fqn, module, by_output, processes)
        elif isinstance(module, GroupedExperts) and not has_expert_parallelism:
            check_part_of_experts(module, processes)
        elif isinstance(module, MoE) and has_expert_parallelism and module.shared_experts is not None:
            module.shared_experts.register_forward_pre_hook(lambda _, inputs: _of_whole_sequences(inputs, sequences))


def _of_whole_sequences(inputs: tuple, split: SplitSequences) -> tuple:
    return tuple(of_whole_sequences(x, split) if isinstance(x, NormedInput) else x for x in inputs)


def parallelized(parallelize_fn: Callable, job_config) -> Callable:
    """Return a parallelize function of TorchTitan with mxtrain's additions for a converted model."""

    def parallelize(model: nn.Module, *, parallel_dims, **configs) -> nn.Module:
        show_line(describe_model(job_config, model))
        with additions(model, parallel_dims, job_config):
            return parallelize_fn(model, parallel_dims=parallel_dims, **configs)

    return parallelize


@contextmanager
def additions(model: nn.Module, parallel_dims, job_config) -> Iterator[None]:
    """Context in which TorchTitan parallelizes a converted model, with mxtrain's additions before and afterwards."""
    if parallel_dims.tp_enabled:
        split_layers(model, parallel_dims.get_mesh("tp"), parallel_dims.ep_enabled)
    with knows_own_operations():
        contexts = torch.utils.checkpoint.create_selective_checkpoint_contexts
        with patch("torchtitan.distributed.activation_checkpoint.create_selective_checkpoint_contexts", contexts):
            yield
    _redistribute_in_hooks(model, parallel_dims)
    wrappers = [module for module in model.modules() if isinstance(module, CheckpointWrapper)]
    is_selective = any("context_fn" in wrapper.checkpoint_fn.keywords for wrapper in wrappers)
    drawn_as = partial(_drawn_as, getattr(model, "enable_weight_tying", False))
    finish_layout(model, parallel_dims, job_config, is_selective, drawn_as)


def _redistribute_in_hooks(model: nn.Module, parallel_dims) -> None:
    """Give norms and linears their class's forward again, and tensor parallelism its redistributions as hooks.

    Around the forward that TorchTitan sets, diagnostics would see inputs before and results after a redistribution. And
    a linear with a forward of its own is no part of a group (``mxtrain.nn.group``).
    """

    def redistribute(layer: nn.Module, args: tuple, kwargs: dict) -> tuple:
        return layer._redistribute_inputs(parallel_dims, args, kwargs)

    for module in model.modules():
        is_ours = isinstance(module, MXNorm | QuantizedLinear) and vars(module).pop("forward", None) is not None
        if is_ours and parallel_dims.tp_enabled:
            module.register_forward_pre_hook(redistribute, with_kwargs=True)
            module.register_forward_hook(
                lambda layer, _, y: layer._redistribute_outputs(parallel_dims, y), prepend=True
            )


def _drawn_as(is_tied: bool, name: str) -> str:
    """The name by which a weight is drawn. ``init_weights`` ties the embedding to the head, 0.2.2's the reverse."""
    name = name_in_022(name)
    return "tok_embeddings.weight" if is_tied and name == "output.weight" else name


# Every module of a model must have 0.3's class ``Module``, and its linears and norms are PyTorch's with this class
# added. Initial values and sharding are attributes of an instance, and a converter moves them to the new module.

_PLAIN = {Linear: nn.Linear, RMSNorm: nn.RMSNorm}


@contextmanager
def plain_modules(model: nn.Module) -> Iterator[None]:
    """While active, linears and RMSNorms have PyTorch's classes. Afterwards every module has the class ``Module``.

    Flex attention is plain attention meanwhile: without data it takes the features of values to be those of queries.
    """
    for module in model.modules():
        module.__class__ = _PLAIN.get(type(module), type(module))
        if isinstance(module, FlexAttention):
            module.forward = MethodType(_plain_attention, module)
    try:
        yield
    finally:
        titan = {plain: kind for kind, plain in _PLAIN.items()}
        for module in model.modules():
            if isinstance(module, FlexAttention):
                del module.forward
            if not isinstance(module, Module):
                module.__class__ = titan.get(type(module)) or _with_module(type(module))
                module._pos_arg_list = ["input"]  # the name of the argument in TorchTitan's shardings


def _plain_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_) -> torch.Tensor:
    """Attention to all positions, [..., L, heads, features of v]."""
    q, k, v = (x.transpose(-3, -2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(-3, -2)


@cache
def _with_module(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind, Module), {"__module__": kind.__module__, "__doc__": kind.__doc__})


class CodesDispatcher(AllToAllTokenDispatcher):
    """``AllToAllTokenDispatcher`` that also takes the result of an MXNorm. For tensors it does the same."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        pass

    def dispatch(self, x_TD, *routing):
        rows = x_TD[:] if self.ep_mesh is not None and isinstance(x_TD, NormedInput) else x_TD
        if not isinstance(rows, RoutedRows):
            return super().dispatch(rows, *routing)
        packed, counts, sent = super().dispatch(rows.packed, *routing)
        index, splits = sent.token_indices_experts_sorted_N, (sent.input_splits, sent.output_splits)
        h = SentRows.apply(rows.h, index, sent.permuted_indices, *splits, self.ep_mesh.get_group().group_name)
        of_results = replace(sent, input_shape=(packed.shape[0], h.shape[1]))
        return RoutedRows(h, packed, rows.format), counts, of_results
