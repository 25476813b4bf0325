"""Shared experts behind an MXNorm, where gate and routed experts take a shard of the sequences.

With tensor and expert parallelism at once, a norm returns the result of its own shard [B, S / P, D]. Shared experts are
split by features and need the result of whole sequences [B, S, D]. So x is gathered, and normalized and cast again.
"""

import torch

from mxtrain.formats.collectives import gather_tokens, sum_tokens
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.launch.keyed import from_key
from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.split import SplitSequences
from mxtrain.nn.three_gemms import constant_operand, without_data


@untraced
class _Gather(torch.autograd.Function):
    """h and x [B, S / P, D] -> h and x [T, D], T = B S, rho [T] and the tensors of xhat's operand.

    Every linear returns its process's part of dL/dxhat, the gradient of h.
    """

    @staticmethod
    def forward(ctx, h, x, estimate_key: str, recipe_key: str, mode: str, split_key: str):
        split = from_key(split_key)
        whole = gather_tokens(x, split.group, split.processes).view(-1, x.shape[-1])
        recipe = from_key(recipe_key)
        xhat, rho = recipe.ops.normalize(whole, from_key(estimate_key), recipe, mode)
        ctx.set_materialize_grads(False)
        ctx.split, ctx.batch = split, x.shape[0]
        ctx.mark_non_differentiable(*(t for t in (whole, rho, *xhat) if t is not None))
        return without_data(whole, whole.shape), whole, rho, *xhat

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dxhat: torch.Tensor, *others):
        dxhat = dxhat.view(ctx.batch, -1, dxhat.shape[-1])
        return sum_tokens(dxhat, ctx.split.group, ctx.split.processes), *[None] * 5


def of_whole_sequences(normed: NormedInput, split: SplitSequences) -> NormedInput:
    """A norm's result for a shard [B, S / P, D] of the sequences -> the result for whole sequences [B, S, D]."""
    batch, length, features = normed.shape
    keys = normed.made_by.estimate.key, normed.recipe.key, normed.mode, split.key
    h, x, rho, *xhat = _Gather.apply(normed.h, normed.x.view(normed.shape), *keys)
    h = h.view(batch, split.processes * length, features)
    return normed._replace(h=h, x=x, rho=rho, xhat=constant_operand(xhat, normed.mode))
