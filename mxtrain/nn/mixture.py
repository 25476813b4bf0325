"""The gate and the shared experts of a mixture of experts that an MXNorm feeds.

The gate reads x and rho instead of codes, because choices of experts are sensitive to rounding:

    logits = rho (x (Wg diag(gamma))^T) + bias

The folded weight is two bf16 matrices, one below the other, whose sum has its first 16 bits: the product of bf16 tokens
is then exact but for the fp32 sums, and no token chooses other experts than in fp64.
"""

import torch

from mxtrain.formats.collectives import sum_tokens
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.launch import from_key
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.decompose_k.op import decompose_k_mm
from mxtrain.nn.decompose_k.router import DecomposeKRouter
from mxtrain.nn.gathered_norm import as_sequences, normalize_whole
from mxtrain.nn.normed_input import NormedInput, check_norm_result
from mxtrain.nn.split import SplitSequences, own_part
from mxtrain.nn.three_gemms import constant_operand
from mxtrain.norms.mxnorm import fold_backward


@untraced
class _NormedLogits(torch.autograd.Function):
    """h, x [T, D], rho [T], gamma [D], Wg [E, D], bias -> logits [T, E]. The gradient of h is dL/dxhat."""

    @staticmethod
    def forward(ctx, h, x, rho, gain, weight, bias, mode: str):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rho, gain, weight)
        ctx.mode, ctx.dtype, ctx.bias_dtype = mode, h.dtype, None if bias is None else bias.dtype
        folded = _folded(weight, gain)
        if x.dtype == torch.bfloat16:
            high = folded.to(torch.bfloat16)
            parts = torch.cat((high, (folded - high).to(torch.bfloat16)))
            of_parts = decompose_k_mm(x, parts.t(), None, None, torch.float32)
            logits = of_parts[:, : len(weight)] + of_parts[:, len(weight) :]
        else:
            logits = decompose_k_mm(x, folded.to(x.dtype).t(), None, None, x.dtype)
        logits = logits * rho[:, None]
        return logits if bias is None else logits + bias

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dlogits: torch.Tensor):
        x, rho, gain, weight = saved
        needs_h, _, _, needs_gain, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dh = dgain = dweight = dbias = None
        if needs_bias:
            dbias = dlogits.sum(0).to(ctx.bias_dtype)
        if needs_h:
            folded = _folded(weight, gain).to(x.dtype)
            dh = decompose_k_mm(dlogits.to(x.dtype), folded, None, None, x.dtype).to(ctx.dtype)
        if needs_gain or needs_weight:
            scaled = (dlogits * rho[:, None]).to(x.dtype)
            dfolded = decompose_k_mm(scaled.t(), x, None, None, at_least_fp32(scaled).dtype)
            if gain is None:
                dweight = dfolded.to(weight.dtype)
            else:
                dweight, dgain = fold_backward(dfolded, weight, gain, ctx.mode)
        return dh, None, None, dgain, dweight, dbias, None


def _folded(weight: torch.Tensor, gain: torch.Tensor | None) -> torch.Tensor:
    weight = at_least_fp32(weight)
    return weight if gain is None else weight * gain


class MXNormRouter(DecomposeKRouter):
    """The gate of a router, for the result of an MXNorm; fp32 logits. For a tensor it is a ``DecomposeKRouter``.

    Parameters, FQNs and shapes are those of ``torch.nn.Linear``.
    """

    def forward(self, x: NormedInput | torch.Tensor) -> torch.Tensor:
        """NormedInput of [..., D] -> logits [..., E], fp32 (fp64 for fp64).

        Raises:
            TypeError, ConfigError: as ``MXNormLinear.forward``.
        """
        if isinstance(x, torch.Tensor):
            return super().forward(x)
        check_norm_result(x)
        weight, bias = own_part(self.weight), own_part(self.bias)
        h = x.h.reshape(-1, x.shape[-1])
        logits = _NormedLogits.apply(h, x.x, x.rho, x.gain, weight, bias, x.mode)
        return logits.view(*x.shape[:-1], -1)


@untraced
class _GatherShards(torch.autograd.Function):
    """h and x [B, S / P, D] -> h and x [T, D], T = B S, rho [T] and the tensors of xhat's operand.

    With tensor and expert parallelism at once, a norm returns the result of its own shard, for gate and routed experts.
    Shared experts are split by features and need whole sequences. So x is gathered, and normalized and cast again.

    Every linear returns its process's part of dL/dxhat, the gradient of h.
    """

    @staticmethod
    def forward(ctx, h, x, estimate_key: str, recipe_key: str, mode: str, split_key: str):
        ctx.split, ctx.batch = from_key(split_key), x.shape[0]
        return normalize_whole(ctx, x, estimate_key, recipe_key, mode, ctx.split)

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dxhat: torch.Tensor, *others):
        dxhat = dxhat.view(ctx.batch, -1, dxhat.shape[-1])
        return sum_tokens(dxhat, ctx.split.group, ctx.split.processes), *[None] * 5


def of_whole_sequences(normed: NormedInput, split: SplitSequences) -> NormedInput:
    """A norm's result for a shard [B, S / P, D] or [T / P, D] -> the result for whole sequences [B, S, D] or [T, D]."""
    h = as_sequences(normed.h)
    keys = normed.made_by.estimate.key, normed.recipe.key, normed.mode, split.key
    h, x, rho, *xhat = _GatherShards.apply(h, normed.x.view(h.shape), *keys)
    h = h.view(*normed.shape[:-2], -1, normed.shape[-1])
    return normed._replace(h=h, x=x, rho=rho, xhat=constant_operand(xhat, normed.mode))
