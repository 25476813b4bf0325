"""What all autograd functions share.

Derivatives of their gradients would be wrong without an error, so they are refused, and so are transforms of
``torch.func``.
"""

from collections.abc import Callable
from functools import wraps

import torch

MESSAGE = (
    "mxtrain's layers have no second derivatives: a gradient penalty, a Hessian or another use of create_graph=True "
    "needs a model that was not converted"
)
NO_TRANSFORMS = (
    "mxtrain's layers do not run in transforms of torch.func (grad, vmap, jvp and others): use backward or "
    "torch.autograd.grad, or a model that was not converted"
)


def once_differentiable(backward: Callable) -> Callable:
    """Return the backward of an autograd function that calls ``backward(ctx, saved, *gradients)``.

    It raises RuntimeError where its results are differentiated. If every incoming gradient is None, it returns None for
    each input, as PyTorch's own.

    The forward calls ``ctx.set_materialize_grads(False)``: else PyTorch would make zeros of no gradient, and weights
    that the loss does not need would get zeros. ``saved`` are the context's saved tensors. ``ctx.h`` is an input kept
    on ctx instead of saved.

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
        sources = [t for t in (*gradients, *saved, getattr(ctx, "h", None)) if t is not None and t.requires_grad]
        if isinstance(results, tuple):
            return tuple(_refused(result, sources) for result in results)
        return _refused(results, sources)

    return run


def _refused(gradient: torch.Tensor | None, sources: list[torch.Tensor]) -> torch.Tensor | None:
    """The same values, which raise RuntimeError when they are differentiated.

    They hang on ``sources``, because autograd visits only what lies on the way to the tensors that it is asked for.
    """
    if gradient is None:
        return None
    # A backward may return its argument: detached, so that the caller's tensor stays as it is.
    tensors = gradient.detach().requires_grad_(), *sources
    results = torch._C._functions.DelayedError(MESSAGE.encode(), len(tensors))(*tensors)
    return results[0] if sources else results


def refuse_transforms() -> None:
    """Raise RuntimeError in a transform of ``torch.func``, where autograd functions like the layers' cannot run.

    PyTorch's own error asks for a method of the autograd function. The user has none.
    """
    if not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active():
        raise RuntimeError(NO_TRANSFORMS)
