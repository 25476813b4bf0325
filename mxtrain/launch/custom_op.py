"""Code that ``torch.compile`` takes as one operation: ops of our own, and functions that Dynamo does not follow."""

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


untraced = torch.compiler.allow_in_graph
"""
Decorator of a function or of an autograd function. Arguments are tensors, numbers, strings, None, and lists, named
tuples and frozen dataclasses of them; results are tensors. Dynamo puts a call into its graph as one node. If it
followed the code, the checks of a kernel's arguments would take up to 20 ms a call, and an autograd function up to 150
ms. AOTAutograd sees the operations inside. PyTorch 2.11 also loses the gradient of some aliases in a function that
Dynamo follows, so all autograd functions are untraced (``tests/nn/test_compiled_gradients.py``).

Dynamo makes a frozen dataclass again from all its fields, in their order. An object with numbers is passed as its key
(``mxtrain.launch.keyed.Keyed``). A ValueError of a check becomes PyTorch's error for a failed compilation, with the
same text. ``torch.compiler.is_compiling()`` inside depends on PyTorch's version, so it is passed as an argument
"""
