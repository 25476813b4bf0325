"""MXNorm and the linear layers that follow it: the method of arXiv 2603.13180 from end to end.

A pre-norm transformer runs RMSNorm and then casts its output to MX blocks. Both summarise the same row. MXNorm
estimates the RMS from the block maxima that the cast needs anyway:

    m_tk  = max |x_ti| over block k             block maxima, known to the cast
    r_t   = (mean_k m_tk^p)^(1/p) / c(p, B)     RMS estimate; c makes it exact for long Gaussian rows
    rho_t = 1 / sqrt(r_t^2 + eps)
    xhat  = x * rho                             normalized row, cast to MX and never stored in high precision

The gain gamma cannot be broadcast onto block-scaled data cheaply, so it moves into the next weight,

    Y = cast(xhat) cast(W diag(gamma))^T

and with G = dL/d(W diag(gamma)) it returns as  dW = G diag(gamma),  dgamma_j = sum_n W_nj G_nj.

One norm feeds several linears (wq, wk, wv; w1, w3). It runs once and hands them a ``NormedInput``. Its field ``h``
is x itself: every linear returns its dL/dxhat as the gradient of ``h``, autograd adds those up, and one
straight-through norm backward turns the sum into dx. Saved for that are x, which the residual stream keeps anyway,
and rho, one number a token; the xhat of the weight gradient is recomputed from the two.
"""

from typing import NamedTuple

import torch
import torch.nn as nn
from torch.autograd.function import once_differentiable

from mxtrain.errors import ConfigError
from mxtrain.nn.seeded import Seeded
from mxtrain.nn.three_gemms import QuantizedLinear, compute_dtype, dgrad, fprop, quantize_gradient, wgrad
from mxtrain.ops.hardware import resolve_mode
from mxtrain.ops.mxnorm import fold_backward, norm_backward, normalize
from mxtrain.ops.quantize import Operand
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import LinearRecipe, Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate


class NormedInput(NamedTuple):
    """What MXNorm hands to the linears it feeds, with T = the product of the leading dimensions of x.

    Attributes:
        h: x [..., D]. Carries the gradient: what flows into it is dL/dxhat.
        data, scales, tensor_scale: xhat [T, D] as a GEMM operand quantized along D (``ops.quantize.Operand``).
        rho: inverse RMS, fp32 [T].
        gain: the norm's weight [D], for the linears to fold; None for a norm without one.
        signs: of the Hadamard transform in the linears' wgrad (see ``mxtrain.nn.seeded``), the same for all of them, so
            that compiled linears share the transform and the cast of xhat; None without a transform.
        recipe, mode: what the operand was made for; the recipe is that of fprop.
    """

    h: torch.Tensor
    data: torch.Tensor
    scales: torch.Tensor | None
    tensor_scale: torch.Tensor | None
    rho: torch.Tensor
    gain: torch.Tensor | None
    signs: torch.Tensor | None
    recipe: Recipe
    mode: str

    @property
    def shape(self) -> torch.Size:
        """Shape of x: attention modules read their batch and sequence sizes from it."""
        return self.h.shape


class _MXNormFunction(torch.autograd.Function):
    """X [T, D] -> (X, data, scales and tensor scale of the operand, rho), with the straight-through norm backward."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str):
        operand, rho = normalize(x, estimate, recipe, mode)
        ctx.save_for_backward(x, rho)
        ctx.mode = mode
        ctx.mark_non_differentiable(*(t for t in (*operand, rho) if t is not None))
        return x.view_as(x), *operand, rho

    @staticmethod
    @once_differentiable
    def backward(ctx, dxhat: torch.Tensor, *_):
        x, rho = ctx.saved_tensors
        return norm_backward(dxhat, x, rho, ctx.mode), None, None, None


class _MXNormLinearFunction(torch.autograd.Function):
    """(h, quantized xhat, rho, gamma, W) -> Y [T, N]; gradients of h (dL/dxhat), gamma and W."""

    @staticmethod
    def forward(ctx, h, data, scales, tensor_scale, rho, gain, weight, signs, draws, recipe: LinearRecipe, mode: str):
        ctx.save_for_backward(h, rho, gain, weight, signs, draws)
        ctx.recipe, ctx.mode = recipe, mode
        return fprop(Operand(data, scales, tensor_scale), weight, recipe, mode, compute_dtype(h), gain)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        x, rho, gain, weight, signs, draws = ctx.saved_tensors
        recipe, mode = ctx.recipe, ctx.mode
        needs_weight = ctx.needs_input_grad[6] or (gain is not None and ctx.needs_input_grad[5])
        for_dxhat, for_dw = quantize_gradient(dy, recipe, mode, ctx.needs_input_grad[0], needs_weight, signs, draws)
        dxhat = d_gain = d_weight = None
        if for_dxhat is not None:
            dxhat = dgrad(for_dxhat, weight, recipe, mode, dy.dtype, gain).to(x.dtype)
        if for_dw is not None:
            d_weight = wgrad(for_dw, x, recipe, mode, dy.dtype, rho, signs)
            if gain is None:
                d_weight = d_weight.to(weight.dtype)
            else:
                d_weight, d_gain = fold_backward(d_weight, weight, gain, mode)
        return dxhat, None, None, None, None, d_gain, d_weight, None, None, None, None


class MXNorm(Seeded, nn.RMSNorm):
    """RMSNorm whose RMS comes from block maxima and whose result is a quantized operand for ``MXNormLinear``.

    It makes the operand of its linears' fprop, and has that recipe in common with them; what wgrad needs of the norm
    are the signs of a transform.

    It keeps RMSNorm's parameter (``weight``, the gain) and its FQN, so checkpoints load either way. Its result is a
    ``NormedInput``, which only ``MXNormLinear`` understands.

    Source: arXiv 2603.13180.

    Args:
        dim: row length D, a multiple of the block size of fprop's recipe.
        eps: added to the squared RMS estimate.
        elementwise_affine: whether there is a gain.
        p: exponent of the mean over block maxima, 1 or 2.
        estimator: "pre_round" (the method), "post_round" (ablation) or "exact" (control).
        recipe: as for ``MXLinear``; the linears fed must have the same recipe of fprop.
        mode: "auto", "native", "emulated" or "reference".

    Raises:
        ConfigError: for an unknown setting, a mode the hardware lacks, or a ``dim`` that no block divides.
    """

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        p: int = 2,
        estimator: str = "pre_round",
        recipe="mxfp8",
        mode="auto",
        **factory_kwargs,
    ):
        self.recipe = get_recipe(recipe)
        self.mode = resolve_mode(mode)
        fprop = self.recipe.fprop
        self.estimate = RMSEstimate.for_recipe(fprop, p, estimator, eps)
        if dim % fprop.block_size:
            raise ConfigError(
                f"dim = {dim} is not a multiple of the block size {fprop.block_size} of recipe {fprop.name!r}"
            )
        super().__init__(dim, eps, elementwise_affine, **factory_kwargs)
        self.set_seed(0, "")

    @classmethod
    def from_rms_norm(
        cls, norm: nn.RMSNorm, *, p=2, estimator="pre_round", eps: float | None = None, recipe="mxfp8", mode="auto"
    ) -> "MXNorm":
        """The MXNorm that takes the place of ``norm``, sharing its gain; ``eps`` None keeps that of ``norm``."""
        if len(norm.normalized_shape) != 1:
            raise ConfigError(f"normalized_shape = {tuple(norm.normalized_shape)} has more than one dimension")
        if eps is None:
            # nn.RMSNorm without eps uses the machine epsilon of its input's dtype; its parameters' stands for that.
            eps = norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps
        new = cls(
            norm.normalized_shape[0],
            eps,
            norm.elementwise_affine,
            p=p,
            estimator=estimator,
            recipe=recipe,
            mode=mode,
            device="meta",
        )
        new.weight = norm.weight
        return new.train(norm.training)

    def forward(self, x: torch.Tensor) -> NormedInput:
        """x [..., D], bf16 or fp32 -> NormedInput."""
        rows, recipe = x.reshape(-1, x.shape[-1]), self.recipe.fprop
        h, *operand, rho = _MXNormFunction.apply(rows, self.estimate, recipe, self.mode)
        return NormedInput(h.view_as(x), *operand, rho, self.weight, self.signs(x.device), recipe, self.mode)

    def extra_repr(self) -> str:
        e = self.estimate
        return f"{super().extra_repr()}, p={e.p}, estimator={e.estimator}, recipe={self.recipe.fprop}, mode={self.mode}"


class MXNormLinear(QuantizedLinear):
    """The linear layer after an MXNorm: folds the norm's gain into its weight and multiplies the quantized rows.

    Parameters, FQNs and shapes are those of ``torch.nn.Linear``. The weight is folded and cast from its own dtype
    (fp32 master weights are not rounded to bf16 on the way).

    Args:
        in_features, out_features: multiples of the recipe's block sizes.
        bias: whether to add a bias, in high precision.
        recipe, mode: as for ``MXLinear``; the recipe of fprop must be that of the norm.

    Raises:
        ConfigError: as for ``MXLinear``.
    """

    def forward(self, x: NormedInput) -> torch.Tensor:
        """NormedInput of [..., in_features] -> [..., out_features] in autocast's dtype, or that of x without autocast.

        Raises:
            TypeError: for a plain tensor: the RMSNorm before this layer was not swapped.
            ConfigError: for the result of an MXNorm with another recipe of fprop, or another mode.
        """
        if not isinstance(x, NormedInput):
            raise TypeError(f"MXNormLinear takes the result of an MXNorm, not {type(x).__name__}")
        if x.recipe != self.recipe.fprop or x.mode != self.mode:
            raise ConfigError(
                f"this MXNormLinear has recipe {self.recipe.fprop} and mode {self.mode!r}, but its input was "
                f"normalized with recipe {x.recipe} and mode {x.mode!r}"
            )
        y = _MXNormLinearFunction.apply(
            x.h.reshape(-1, x.shape[-1]),
            x.data,
            x.scales,
            x.tensor_scale,
            x.rho,
            x.gain,
            self.weight,
            # A norm whose own recipe has no transform hands on none.
            self.signs(x.h.device) if x.signs is None else x.signs,
            self.draws(x.h.device),
            self.recipe,
            self.mode,
        )
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)
