"""Registers an op of PyTorch's, which ``torch.compile`` and activation checkpointing treat as one operation."""

from collections.abc import Callable, Iterable

import torch

_LIBRARY = torch.library.Library("mxtrain", "FRAGMENT")


def define_op(schema: str, run: Callable, fake: Callable, device_types: Iterable[str] = ("CPU", "CUDA")):
    """Register the op ``torch.ops.mxtrain.NAME``, which has no gradient, and return it.

    ``torch.library.custom_op`` would do the same, but its checks take longer than a small product.

    Args:
        schema: the op's name, arguments and results.
        run: computes the results.
        fake: the same for fake tensors: allocates the results.
        device_types: of the tensors that ``run`` takes.
    """
    name = schema.partition("(")[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    for device_type in device_types:
        _LIBRARY.impl(name, run, device_type)
    torch.library.register_fake(f"mxtrain::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mxtrain, name).default
