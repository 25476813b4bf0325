"""Modules of TorchTitan 0.3 as PyTorch's own, which converters swap, and back.

Every module of a model must have 0.3's class ``Module``, and its linears and norms are PyTorch's with this class added.
What it adds, initial values and sharding, are attributes of an instance, and a converter moves them to the new module.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from unittest.mock import patch

import torch
import torch.nn as nn
import torch.nn.functional as F
from torchtitan.models.common import Linear, RMSNorm
from torchtitan.models.common.attention import FlexAttention
from torchtitan.protocols.module import Module

_PLAIN = {Linear: nn.Linear, RMSNorm: nn.RMSNorm}


@contextmanager
def plain_modules(model: nn.Module) -> Iterator[None]:
    """While active, linears and RMSNorms have PyTorch's classes. Afterwards every module has the class ``Module``.

    Flex attention is plain attention meanwhile: without data it takes the features of values to be those of queries.
    """
    for module in model.modules():
        module.__class__ = _PLAIN.get(type(module), type(module))
    try:
        with patch.object(FlexAttention, "forward", _plain_attention):
            yield
    finally:
        titan = {plain: kind for kind, plain in _PLAIN.items()}
        for module in model.modules():
            if not isinstance(module, Module):
                module.__class__ = titan.get(type(module)) or _with_module(type(module))
                module._pos_arg_list = ["input"]  # the name of the argument in TorchTitan's shardings


def _plain_attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **_) -> torch.Tensor:
    """Attention to all positions, [B, L, heads, features of v]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)


@cache
def _with_module(kind: type[nn.Module]) -> type[nn.Module]:
    return type(kind.__name__, (kind, Module), {"__module__": kind.__module__, "__doc__": kind.__doc__})
