"""MXNorm of gated rows, in groups of features: the norm before the output projection of Mamba-2 and Nemotron-H.

    u = x silu(gate)     in fp32
    xhat = rho u         with one rho per token and group

The norm and its backward see every group as a row. Blocks do not cross groups, so the blocks of all groups of a token
are a row for the linear.
Gated rows are far from Gaussian: block maxima (p = 2) give 1.66 times their RMS with blocks of 32, 1.49 times with 16.
So ``convert`` takes the exact RMS, or divides by a measured ratio, ``RMSEstimate.ratio``.
"""

import torch
import torch.nn.functional as F

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hardware import VALUE_MODES, mode_in_forward
from mxtrain.formats.matrices import Operand, at_least_fp32
from mxtrain.formats.mxnorm import inverse_rms, scale_rows
from mxtrain.formats.recipe import Recipe
from mxtrain.formats.swiglu import swiglu, swiglu_backward
from mxtrain.launch import from_key
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.group import GroupCall
from mxtrain.nn.mxnorm import MXNorm
from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.three_gemms import check_input, constant_operand, without_data
from mxtrain.norms.mxnorm import norm_backward


def normalize_groups(
    u: torch.Tensor, groups: int, estimate: RMSEstimate, recipe: Recipe, mode: str
) -> tuple[Operand, torch.Tensor]:
    """u [T, D] -> xhat as the operand [T, D] of fprop with this recipe, and rho, fp32 [T, groups]."""
    ops, has_codes, rows = recipe.ops, mode not in VALUE_MODES, u.view(groups * u.shape[0], -1)
    if recipe.tensor_scale == "row" and groups > 1:
        # The tensor scale of a token is that of all its groups.
        rho = inverse_rms(rows, estimate, recipe).view(-1, groups)
        return ops.cast([scale_rows(u, rho)], recipe, mode, (1,))[1], rho
    # The scales of codes lie in the order of whole rows.
    xhat, rho = ops.normalize(rows, estimate, recipe, mode, as_codes=has_codes)
    data, scales = (None if t is None else t.view(u.shape[0], -1) for t in (xhat.data, xhat.scales))
    xhat = xhat._replace(data=data, scales=scales)
    return ops.from_codes(xhat, mode, 1) if has_codes else xhat, rho.view(-1, groups)


@untraced
class _GatedNormFunction(torch.autograd.Function):
    """x and gate [T, D] -> h, u [T, D], rho [T, groups] and the tensors of xhat's operand. See ``_MXNormFunction``."""

    @staticmethod
    def forward(ctx, x, gate, groups: int, estimate_key: str, recipe_key: str, mode: str, is_compiled: bool):
        u = swiglu(at_least_fp32(gate), x)
        xhat, rho = normalize_groups(u, groups, from_key(estimate_key), from_key(recipe_key), mode)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gate, u, rho)
        ctx.mode, ctx.is_compiled = mode, is_compiled
        ctx.mark_non_differentiable(*(t for t in (u, rho, *xhat) if t is not None))
        return without_data(x, x.shape), u, rho, *xhat

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dxhat: torch.Tensor, *_):
        x, gate, u, rho = saved
        rows = u.view(rho.numel(), -1)
        du = norm_backward(dxhat.reshape(rows.shape), rows, rho.view(-1), ctx.mode, ctx.is_compiled).view(u.shape)
        dgate, dx = swiglu_backward(du, at_least_fp32(gate), x)
        return dx.to(x.dtype), dgate.to(gate.dtype), *[None] * 5


class GatedMXNorm(MXNorm):
    """MXNorm of x silu(gate), in groups of features.

    Attributes:
        groups: their number; each is whole blocks of fprop's recipe.
    """

    groups = 1

    def forward(self, x: torch.Tensor, gate: torch.Tensor) -> NormedInput | torch.Tensor:
        """x and gate [..., D], bf16 or fp32 -> NormedInput; a plain norm returns a tensor.

        Raises:
            ValueError: for another dtype, shape or device.
        """
        if self.is_plain:
            u = swiglu(at_least_fp32(gate), x).unflatten(-1, (self.groups, -1))
            y = F.rms_norm(u, u.shape[-1:], None, self.plain_eps).flatten(-2)
            return (y if self.weight is None else y * self.gain()).to(x.dtype)
        mode, recipe = mode_in_forward(self.mode, x.device.type), self.recipe.fprop
        for tensor in (x, gate):
            check_input(tensor, self.normalized_shape[0], self.weight, self.recipe, mode)
        settings = self.groups, self.estimate.key, recipe.key, mode, torch.compiler.is_compiling()
        rows = (tensor.reshape(-1, x.shape[-1]) for tensor in (x, gate))
        h, u, rho, *xhat = _GatedNormFunction.apply(*rows, *settings)
        call = None if self.group is None else GroupCall(self.group)
        normed = h.view(x.shape), u, constant_operand(xhat, mode), rho, self.weight
        return NormedInput(self, *normed, self.signs(x.device), recipe, mode, None, call)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, groups={self.groups}, ratio={self.estimate.ratio:g}"
