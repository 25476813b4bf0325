"""MXNorm and the linear layers that follow it: the method of arXiv 2603.13180 from end to end.

A pre-norm transformer runs RMSNorm, then casts the result to MX blocks. Both steps summarize the same row. MXNorm
estimates the RMS of token t from the maxima of its K blocks of B elements, which the cast needs anyway:

    m_tk   = max |x_ti| over block k
    r_t    = (mean_k m_tk^p)^(1/p) / c(p, B)     c makes the estimate exact for long Gaussian rows
    rho_t  = 1 / sqrt(r_t^2 + eps)
    xhat_t = rho_t x_t                           cast to MX at once, never stored in high precision

RMSNorm's gain gamma has one factor per column, which block scales cannot absorb. So gamma moves into the next weight.
(gamma is the norm's weight w, or 1 + w in fp32. The gradients of gamma and w are equal.)

    Y = cast(xhat) cast(W diag(gamma))^T

Backward, casts pass gradients straight through. With G = dL/d(W diag(gamma)) and g = dL/dxhat, summed over all linears
that the norm feeds:

    dW = G diag(gamma)     dgamma_j = sum_n W_nj G_nj     dx = rho (g - xhat mean_D(g xhat))

The norm runs once for all its linears (wq, wk, wv; w1, w3) and hands them a ``NormedInput``. Its field ``h`` stands for
x, and every linear returns g as the gradient of ``h``. Autograd adds up these gradients, then one norm backward runs.
The backward needs one rho per token, and x, which the residual stream keeps anyway. wgrad recomputes xhat from both.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.errors import ConfigError, require_positive_integer
from mxtrain.formats.estimate import Estimator, P, RMSEstimate
from mxtrain.formats.hardware import Mode, mode_in_forward
from mxtrain.formats.matrices import Operand
from mxtrain.formats.recipe import DEFAULT_RECIPE, LinearRecipe
from mxtrain.formats.schedule import LayerState
from mxtrain.launch import from_key
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.gathered_norm import GatheredColumns, GatherSequences, normalize_shard
from mxtrain.nn.group import GroupCall, LinearGroup
from mxtrain.nn.normed_input import NormedInput, check_norm_result
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.nn.split import SplitSequences, own_part
from mxtrain.nn.three_gemms import (
    QuantizedLinear,
    ReadyOperands,
    ThreeGEMMs,
    check_dtype,
    check_input,
    compute_dtype,
    constant_operand,
    without_data,
)
from mxtrain.norms.mxnorm import fold_backward, norm_backward
from mxtrain.norms.rms_norm import OffsetRMSNorm


@untraced
class _MXNormFunction(torch.autograd.Function):
    """x [T, D] -> h, rho and the tensors of xhat's operand. The gradient of h is dL/dxhat.

    h has no data. If it were x itself, and a compiled graph ended between a norm and its linears, PyTorch would take
    the gradient of h for that of x, and skip this backward.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, estimate_key: str, recipe_key: str, mode: str, is_compiled: bool):
        recipe = from_key(recipe_key)
        xhat, rho = recipe.ops.normalize(x, from_key(estimate_key), recipe, mode)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rho)
        ctx.mode, ctx.is_compiled = mode, is_compiled
        ctx.mark_non_differentiable(*(t for t in (rho, *xhat) if t is not None))
        return without_data(x, x.shape), rho, *xhat

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dxhat: torch.Tensor, *_):
        x, rho = saved
        return norm_backward(dxhat, x, rho, ctx.mode, ctx.is_compiled), None, None, None, None


class _Constants(NamedTuple):
    """What ``_MXNormLinearFunction`` does not differentiate. The tensors are those of ``NormedInput``."""

    gemms: ThreeGEMMs
    dtype: torch.dtype
    ready: ReadyOperands | None
    joined: bool
    xhat: Operand
    x: torch.Tensor
    rho: torch.Tensor
    signs: torch.Tensor | None
    gathered: GatheredColumns | None
    estimate_key: str
    draws: Sequence[torch.Tensor | None]
    """Of every linear"""


@untraced
class _MXNormLinearFunction(torch.autograd.Function):
    """h, gamma and the weights of n linears -> Y_i [T, N_i] of every linear. The gradient of h is dL/dxhat.

    Mostly n = 1; several linears of one norm can be one GEMM (``mxtrain.nn.group``).
    """

    @staticmethod
    def forward(ctx, h, gain, of: _Constants, *weights):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(of.x, gain, of.rho, of.signs, *weights)
        ctx.gemms, ctx.gathered, ctx.draws, ctx.ready, ctx.dtype = of.gemms, of.gathered, of.draws, of.ready, h.dtype
        ctx.estimate_key = of.estimate_key
        return of.gemms.fprop(of.xhat, weights, of.dtype, gain, of.ready, of.joined)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, *dys: torch.Tensor | None):
        x, gain, rho, signs, *weights = saved
        gemms, (needs_h, *needs_others) = ctx.gemms, ctx.needs_input_grad
        # A linear whose output the loss does not need gets no gradient, as if it had multiplied alone.
        used = [dy is not None for dy in dys]
        like = next(dy for dy in dys if dy is not None)
        dys = [like.new_zeros(like.shape[0], w.shape[0]) if dy is None else dy for dy, w in zip(dys, weights)]
        needs_wgrad = any(needs_others) and gemms.runs_wgrad
        for_dgrad, for_wgrad = gemms.quantize_gradients(dys, needs_h, needs_wgrad, signs, ctx.draws)
        dxhat = dgain = None
        dweights = [None] * len(weights)
        if for_dgrad is not None:
            dxhat = gemms.dgrad(for_dgrad, weights, like.dtype, gain, ctx.ready).to(ctx.dtype)
        if for_wgrad is not None:
            estimate = from_key(ctx.estimate_key)
            if ctx.gathered is None:
                for_x = gemms.quantize_along_tokens(x, rho, signs, estimate=estimate)
            else:
                for_x = ctx.gathered.operand(x, rho, signs, estimate, gemms.recipe, gemms.mode)
            dweight = gemms.wgrad(for_wgrad, for_x, like.dtype)
            dweights = [dweight] if len(weights) == 1 else dweight.split([weight.shape[0] for weight in weights])
            if gain is None:
                dweights = [dw.to(weight.dtype) for dw, weight in zip(dweights, weights)]
            else:
                folded = [fold_backward(dw, weight, gain, gemms.mode) for dw, weight in zip(dweights, weights)]
                dweights, dgains = zip(*folded)
                dgain = sum(dgains[1:], start=dgains[0])
            dweights = [dw if is_used else None for dw, is_used in zip(dweights, used)]
        return dxhat, dgain, None, *dweights


def _multiply(
    x: NormedInput, linears: Sequence["MXNormLinear"], gemms: ThreeGEMMs, ready: ReadyOperands | None, joined: bool
) -> tuple[torch.Tensor, ...]:
    """Y_i [T, N_i] of every linear, without its bias."""
    signs, gathered = x.signs, x.gathered
    if signs is None and gemms.recipe.needs_signs:
        # A norm whose own recipe has no transform hands on no signs. The linears' own differ, so each is alone here.
        (linear,) = linears
        signs = linear.signs(x.h.device)
        gathered = None if gathered is None else GatheredColumns(gathered.split_key, {})
    gathered = None if gathered is None else gathered.for_function()
    draws, weights = [linear.draws(x.h.device) for linear in linears], [linear.parts()[0] for linear in linears]
    tensors, estimate_key = (x.xhat, x.x, x.rho, signs), x.made_by.estimate.key
    gain = None if gemms.weights_are_cast else x.gain
    constants = _Constants(gemms, compute_dtype(x.h), ready, joined, *tensors, gathered, estimate_key, draws)
    return _MXNormLinearFunction.apply(x.h.reshape(-1, x.shape[-1]), gain, constants, *weights)


class MXNorm(RecipeModule, OffsetRMSNorm):
    """RMSNorm that estimates the RMS from block maxima. Its result is a ``NormedInput`` for ``MXNormLinear``.

    The parameter ``weight`` has RMSNorm's FQN, so checkpoints load either way. With ``split``, x is a shard of the
    sequences and the result stands for whole sequences.

    Source: arXiv 2603.13180.

    Args:
        dim: row length D, a multiple of the block size of fprop's recipe.
        eps: added to the squared RMS estimate.
        elementwise_affine: whether there is a gain.
        p: exponent of the mean over block maxima, 1 or 2.
        estimator: "pre_round" (the method), "post_round" (ablation) or "exact" (control).
        recipe: as for ``MXLinear``; all linears of the norm must have the norm's recipe for fprop.
        mode: as for ``MXLinear``.

    Raises:
        ConfigError: for an unknown setting, a mode that no device of this machine runs, or a ``dim`` that is not whole
            blocks.
    """

    split: SplitSequences | None = None
    gathers_plain = True
    """Whether a plain norm also gathers sequences; otherwise, the modules behind the norm gather tensors"""
    feeds_mixture = False
    """Whether a mixture of experts takes the result"""
    scores_first = False
    """Whether the mixture multiplies rows by their scores before the experts"""
    sends_codes = False
    """Whether experts on other processes get rows as codes"""
    group: LinearGroup | None = None
    """The linears that the norm feeds, if they run as one GEMM forward and backward"""
    is_plain = False
    """Compute RMSNorm in high precision, with ``plain_eps``; the linears then take a plain tensor"""

    def __init__(
        self,
        dim: int,
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        p: P = 2,
        estimator: Estimator = "pre_round",
        recipe: str | LinearRecipe = DEFAULT_RECIPE,
        mode: Mode = "auto",
        **factory_kwargs,
    ):
        self._set_recipe(recipe, mode)
        fprop = self.recipe.fprop
        self.estimate = RMSEstimate.for_recipe(fprop, p, estimator, eps)
        require_positive_integer("dim", dim)
        if dim % fprop.block_size:
            raise ConfigError(
                f"dim = {dim} is not a multiple of the block size {fprop.block_size} of recipe {fprop.name!r}"
            )
        super().__init__(dim, self.estimate.eps, elementwise_affine, **factory_kwargs)
        self.plain_eps: float | None = self.estimate.eps
        self.set_seed(0, "")

    @classmethod
    def from_rms_norm(
        cls,
        norm: nn.RMSNorm,
        *,
        p: P = 2,
        estimator: Estimator = "pre_round",
        eps: float | None = None,
        recipe: str | LinearRecipe = DEFAULT_RECIPE,
        mode: Mode = "auto",
    ) -> "MXNorm":
        """Return the MXNorm that replaces ``norm`` and shares its gain. ``eps`` None stands for the norm's eps."""
        if len(norm.normalized_shape) != 1:
            raise ConfigError(f"normalized_shape = {tuple(norm.normalized_shape)} has more than one dimension")
        if eps is None:
            # nn.RMSNorm without eps uses the machine epsilon of its input's dtype; fp32's stands for it.
            eps = norm.eps if norm.eps is not None else torch.finfo(torch.float32).eps
        shape, affine = norm.normalized_shape[0], norm.elementwise_affine
        new = cls(shape, eps, affine, p=p, estimator=estimator, recipe=recipe, mode=mode, device="meta")
        new.weight, new.plain_eps = norm.weight, norm.eps
        new.add_unit_offset = getattr(norm, "add_unit_offset", False)
        return new.train(norm.training)

    @property
    def layer_state(self) -> LayerState:
        """What this norm computes with now."""
        return LayerState(self.recipe, self.estimate, self.is_plain)

    def take(self, state: LayerState) -> None:
        super().take(state)
        self.estimate, self.is_plain = state.estimate, state.is_plain

    def forward(self, x: torch.Tensor) -> NormedInput | torch.Tensor:
        """x [..., D], bf16 or fp32 -> NormedInput; with ``split``, x [B, S / processes, D] -> NormedInput of [B, S, D].

        A plain norm returns a tensor instead of a NormedInput: its shard, unless it ``gathers_plain``.

        Raises:
            ValueError: for another dtype, shape or device.
        """
        if self.is_plain:
            y = self.plain(x, self.own_weight(), self.plain_eps)
            return GatherSequences.apply(y, self.split.key) if self.split and self.gathers_plain else y
        mode = mode_in_forward(self.mode, x.device.type)
        weight = self.own_weight()
        check_input(x, self.normalized_shape[0], weight, self.recipe, mode)
        recipe = self.recipe.fprop
        if self.split is None:
            rows, keys = x.reshape(-1, x.shape[-1]), (self.estimate.key, recipe.key)
            h, rho, *xhat = _MXNormFunction.apply(rows, *keys, mode, torch.compiler.is_compiling())
            normed = h.view(x.shape), rows.detach(), constant_operand(xhat, mode), rho
            gathered = None
        else:
            *normed, gathered = normalize_shard(x, self.estimate, self.recipe, mode, self.split)
        call = None if self.group is None else GroupCall(self.group)
        settings = (weight, self.signs(x.device), recipe, mode, gathered, call)
        return NormedInput(self, *normed, *settings, self.feeds_mixture, self.sends_codes)

    def own_weight(self) -> torch.Tensor | None:
        """The weight for the linears. Each linear returns its process's part of the gradient."""
        return self.weight if self.split is None else own_part(self.weight)

    def gain(self) -> torch.Tensor | None:
        """The gain that the linears fold."""
        return self.gain_of(self.own_weight())

    def extra_repr(self) -> str:
        if self.is_plain:
            return f"{super().extra_repr()}, in high precision"
        e = self.estimate
        return f"{super().extra_repr()}, p={e.p}, estimator={e.estimator}, recipe={self.recipe.fprop}, mode={self.mode}"


class MXNormLinear(QuantizedLinear):
    """The linear layer after an MXNorm: folds the norm's gain into its weight and multiplies the normalized rows.

    Parameters, FQNs and shapes are those of ``torch.nn.Linear``. The weight is folded and cast from its own dtype, so
    fp32 master weights are not rounded to bf16 first.

    Args:
        in_features, out_features: multiples of the recipe's block sizes.
        bias: whether to add a bias, in high precision.
        recipe, mode: as for ``MXLinear``; fprop's recipe and the mode must be the norm's.

    Raises:
        ConfigError: as for ``MXLinear``.
    """

    fed_by = None

    def take(self, state: LayerState) -> None:
        super().take(state)
        self.is_plain = state.is_plain

    def forward(self, x: NormedInput | torch.Tensor) -> torch.Tensor:
        """NormedInput of [..., in_features] -> [..., out_features], in the dtype of autocast, or of x without autocast.

        A plain layer takes the tensor of a plain norm.

        Raises:
            TypeError: for a plain tensor: the RMSNorm before this layer was not swapped.
            ConfigError: for the result of an MXNorm with another recipe for fprop or another mode, or a result that
                FSDP has cast or freed between the norm and this layer.
            ValueError: for another dtype, shape or device.
        """
        weight, bias = self.parts()
        if self.is_plain:
            return F.linear(x, weight, bias)
        check_norm_result(x)
        gemms = self.gemms(x.h.device)
        if x.recipe != self.recipe.fprop or x.mode != gemms.mode:
            raise ConfigError(
                f"this MXNormLinear has recipe {self.recipe.fprop} and mode {gemms.mode!r}, but its input was "
                f"normalized with recipe {x.recipe} and mode {x.mode!r}"
            )
        check_input(x.h, self.in_features, weight, self.recipe, gemms.mode)
        check_dtype("x under autocast", compute_dtype(x.h), self.recipe, gemms.mode)
        y = None if x.call is None else x.call.output(self, x, gemms, _multiply)
        if y is None:
            (y,) = _multiply(x, (self,), gemms, self.ready_with(x.weight), True)
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias.to(y.dtype)
