"""Refuses derivatives of the layers' gradients, which would be wrong without an error."""

from collections.abc import Callable
from functools import wraps

import torch

MESSAGE = (
    "mxtrain's layers have no second derivatives: a gradient penalty, a Hessian or another use of create_graph=True "
    "needs a model that was not converted"
)


def once_differentiable(backward: Callable) -> Callable:
    """Let the backward of an autograd function run, and raise RuntimeError where its results are differentiated.

    ``torch.autograd.function.once_differentiable`` raises only if the incoming gradient needs a gradient itself. The
    gradient of a sum needs none, and second derivatives would then be zero without an error.
    """

    @wraps(backward)
    def run(ctx, *gradients):
        # In a backward, PyTorch enables gradients for create_graph=True only. Compiled graphs have a refusal of their
        # own, and gradients are enabled while Dynamo follows this function.
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return backward(ctx, *gradients)
        with torch.no_grad():
            results = backward(ctx, *gradients)
        return tuple(map(_refused, results)) if isinstance(results, tuple) else _refused(results)

    return run


def _refused(gradient: torch.Tensor | None) -> torch.Tensor | None:
    """The same values, which raise the error when they are differentiated."""
    if gradient is None:
        return None
    # A backward may return its argument: detached, so that the caller's tensor stays as it is.
    return torch._C._functions.DelayedError(MESSAGE.encode(), 1)(gradient.detach().requires_grad_())
