"""Keeps a forward pass on the meta device from launching Triton kernels, and lets it pass what refuses the device."""

from contextlib import contextmanager
from unittest import mock

import torch
from torch.nn.attention.flex_attention import flex_attention


@contextmanager
def without_triton_launches():
    """Raise RuntimeError where a Triton kernel is launched.

    A kernel takes the null pointer of a meta tensor for an address. On a GPU this is an illegal memory access, after
    which the process cannot use the GPU any more. Ops with a meta version do not launch there.
    """
    try:
        from triton.runtime.jit import KernelInterface
    except ImportError:  # no Triton, no kernels
        yield
        return
    with mock.patch.object(KernelInterface, "__getitem__", _refuse):
        yield


def _refuse(kernel, grid):
    def launch(*args, **kwargs):
        raise RuntimeError("it launches a Triton kernel, which has no meta version")

    return launch


@contextmanager
def with_autocast_of_meta():
    """Let autocast, which refuses the meta device, be off there: models pass it a tensor's device."""
    enter, is_enabled = torch.autocast.__init__, torch.is_autocast_enabled

    def init(self, device_type, *args, **kwargs):
        enter(self, "cpu" if device_type == "meta" else device_type, *args, **kwargs)

    with (
        mock.patch.object(torch.autocast, "__init__", init),
        mock.patch.object(torch, "is_autocast_enabled", lambda *args: args != ("meta",) and is_enabled(*args)),
    ):
        yield


@contextmanager
def with_empty_flex_attention():
    """Let ``flex_attention``, which refuses the meta device, return empty tensors.

    Its code is replaced, not its name, because models import or compile the function before the pass.
    """
    if flex_attention.__code__.co_freevars:  # wrapped by another release of PyTorch, so that the code does not fit
        yield
        return
    code, flex_attention.__code__ = flex_attention.__code__, _in_its_place.__code__
    try:
        yield
    finally:
        flex_attention.__code__ = code


def _in_its_place(*args, **kwargs):
    # PyTorch's function runs this code among the names of its own file.
    from mxtrain.conversion.meta_pass import _empty_attention

    return _empty_attention(*args, **kwargs)


def _empty_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    score_mod=None,
    block_mask=None,
    scale=None,
    enable_gqa=False,
    return_lse=False,
    kernel_options=None,
    *,
    return_aux=None,
):
    """Return what ``flex_attention`` returns for query [B, H, T, D] and value [B, H', S, Dv], without data.

    The result [B, H, T, Dv] lies in memory in the query's order of dimensions, as PyTorch's does: models view it.
    """
    tensors, wanted = (query, key, value), dict(return_lse=return_lse, return_aux=return_aux)
    if torch.overrides.has_torch_function(tensors):  # tell the watcher, which then calls flex_attention
        return torch.overrides.handle_torch_function(flex_attention, tensors, *tensors, **wanted)
    shape, order = (*query.shape[:-1], value.shape[-1]), sorted(range(query.ndim), key=query.stride, reverse=True)
    output = torch.empty_permuted(shape, order, dtype=query.dtype, device=query.device)
    per_row = query.new_empty(query.shape[:-1], dtype=torch.float32)
    if return_aux is not None:
        from torch.nn.attention.flex_attention import AuxOutput  # in newer releases of PyTorch only

        lse, max_scores = (per_row if asked else None for asked in (return_aux.lse, return_aux.max_scores))
        return output, AuxOutput(lse=lse, max_scores=max_scores)
    return (output, per_row) if return_lse else output
