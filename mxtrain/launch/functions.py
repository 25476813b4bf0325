"""How PyTorch's compiler and autograd see code of ours.

Ops, functions that Dynamo does not follow, and gradients without derivatives.
"""

from collections.abc import Callable, Iterable
from functools import wraps

import torch

from mxtrain.launch.pytorch import delayed_error

_LIBRARY = torch.library.Library("mxtrain", "FRAGMENT")


def define_op(schema: str, run: Callable, fake: Callable, device_types: Iterable[str] = ("CPU", "CUDA")):
    """Register the op ``torch.ops.mxtrain.NAME``, which has no gradient, and return it.

    ``torch.library.custom_op`` would do the same, but its checks take longer than a small product.

    ``run`` computes the results, and ``fake`` allocates them for fake tensors.
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
(``mxtrain.launch.Keyed``). A ValueError of a check becomes PyTorch's error for a failed compilation, with the
same text. ``torch.compiler.is_compiling()`` inside depends on PyTorch's version, so it is passed as an argument
"""


MESSAGE = (
    "mxtrain's layers have no second derivatives: a gradient penalty, a Hessian or another use of create_graph=True "
    "needs a model that was not converted"
)


def once_differentiable(backward: Callable) -> Callable:
    """Return the backward of an autograd function that calls ``backward(ctx, saved, *gradients)``.

    It raises RuntimeError where its results are differentiated, because their derivatives would be wrong without an
    error. If every incoming gradient is None, it returns None for each input, as PyTorch's own.

    The forward calls ``ctx.set_materialize_grads(False)``: else PyTorch would make zeros of no gradient, and weights
    that the loss does not need would get zeros. ``saved`` are the context's saved tensors.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradient needs a gradient itself. The
    gradient of a sum needs none, and second derivatives would then be zero without an error.
    """

    @wraps(backward)
    def run(ctx, *gradients):
        if all(gradient is None for gradient in gradients):
            return (None,) * len(ctx.needs_input_grad)
        saved = ctx.saved_tensors  # read once: a checkpoint that is recomputed allows no second reading
        # In a backward, PyTorch enables gradients for create_graph=True only. Compiled graphs have a refusal of their
        # own, and gradients are enabled while Dynamo follows this function.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, saved, *gradients)
        with torch.no_grad():
            results = backward(ctx, saved, *gradients)
        return tuple(map(_refused, results)) if isinstance(results, tuple) else _refused(results)

    return run


def _refused(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The same values, which raise RuntimeError in a backward through them."""
    # A backward may return its argument: detached, so that the caller's tensor stays as it is.
    return None if gradient is None else delayed_error(MESSAGE)(gradient.detach().requires_grad_())
