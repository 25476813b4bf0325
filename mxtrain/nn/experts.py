"""The experts of a mixture, their weights stacked, with quantized GEMMs: fprop, dgrad and wgrad of every expert.

Each expert is a feed-forward network with a gate, W2 (silu(W1 x) * W3 x). Its results and gradients have the bits of
three ``MXLinear`` on its tokens alone. NVFP4's tensor scales are those of one expert. All experts transform with the
signs of the layer; matrix i (w1, w2, w3: 0, 1, 2) of expert e of E rounds stochastically with the layer's key plus
i E + e.
"""

import copy
import functools
from collections.abc import Sequence

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import silu

from mxtrain.custom_op import untraced
from mxtrain.errors import ConfigError
from mxtrain.nn.once_differentiable import once_differentiable
from mxtrain.nn.three_gemms import (
    QuantizedLayer,
    ReadyOperands,
    ThreeGEMMs,
    check_dtype,
    check_features,
    check_input,
    compute_dtype,
)
from mxtrain.ops.arguments import check_tensor
from mxtrain.ops.grouped import (
    TILE_ROWS,
    Groups,
    block_of_rows,
    collect,
    make_groups,
    matmul_rows,
    matmul_tokens,
)
from mxtrain.ops.hardware import resolve_mode
from mxtrain.ops.mxnorm import fold_backward
from mxtrain.recipes.recipe import LinearRecipe

WEIGHTS = ("w1", "w2", "w3")


@untraced
class _GroupedLinears(torch.autograd.Function):
    """X, W_i [E, N, D] -> Y_i: each expert's rows times its matrices. X is cast once for all W_i.

    With a ``gain`` [D], W_i stands for W_i diag(gain).

    With ``from_tokens``, X [T, D] are the rows of the tokens and Y_i [P, N] have padding. Else X [P, D] has padding
    and Y_i [T, N] are the rows of the tokens.
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        gain: torch.Tensor | None,
        groups: Groups,
        from_tokens: bool,
        gemms: ThreeGEMMs,
        ready: Sequence[ReadyOperands | None],
        signs: torch.Tensor | None,
        draws: Sequence[torch.Tensor | None],
        *ws: torch.Tensor,
    ):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gain, signs, *groups, *ws)
        ctx.from_tokens, ctx.gemms, ctx.ready, ctx.draws = from_tokens, gemms, ready, draws
        xq = gemms.quantize_activation(x, groups.source if from_tokens else None, groups.ends)
        operands = [_cast(gemms, w, gain, 1) if r is None else r.fprop[0] for w, r in zip(ws, ready, strict=True)]
        ys = tuple(matmul_rows(xq, w, groups.ends, x.dtype) for w in operands)
        return ys if from_tokens else tuple(collect(y, groups) for y in ys)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, *dys: torch.Tensor | None):
        x, gain, signs, places, ends, source, *ws = saved
        gemms, (needs_x, needs_gain, *_) = ctx.gemms, ctx.needs_input_grad
        need_ws = ctx.needs_input_grad[-len(ws) :]
        source_of_x, source_of_dy = (source, None) if ctx.from_tokens else (None, source)
        dx, dgain, along_tokens, dws = None, None, None, [None] * len(ws)
        for i, (dy, w, ready) in enumerate(zip(dys, ws, ctx.ready, strict=True)):
            if dy is None:
                continue
            needs_w = (need_ws[i] or needs_gain) and gemms.runs_wgrad
            draws = [ctx.draws[i]]
            for_dx, for_dw = gemms.quantize_gradients([dy], needs_x, needs_w, signs, draws, source_of_dy, ends)
            if for_dx is not None:
                part = matmul_rows(for_dx, _cast(gemms, w, gain, 0) if ready is None else ready.dgrad, ends, x.dtype)
                dx = part if dx is None else dx + part
            if for_dw is not None:
                along_tokens = along_tokens or gemms.quantize_along_tokens(x, None, signs, source_of_x, ends)
                dws[i] = matmul_tokens(for_dw, along_tokens, ends, x.dtype)
                if gain is None:
                    dws[i] = dws[i].to(w.dtype)
                else:
                    folded, part = fold_backward(dws[i].flatten(0, 1), w.flatten(0, 1), gain, gemms.mode)
                    dws[i], dgain = folded.view(w.shape), part if dgain is None else dgain + part
        if dx is not None and ctx.from_tokens:
            dx = collect(dx, Groups(places, ends, source))
        return dx, dgain, *[None] * 6, *dws


def _cast(gemms: ThreeGEMMs, w: torch.Tensor, gain: torch.Tensor | None, dim: int):
    """W [E, N, D] as the operand of fprop (1) or dgrad (0)."""
    return gemms.quantize_weights([w], gain, (dim,))[dim]


def _draws_of_experts(draws: torch.Tensor | None, experts: int) -> Sequence[torch.Tensor | None]:
    """A layer's draws, int64 [4] -> those of every expert for w1, w2 and w3, each [E, 4]."""
    if draws is None:
        return (None,) * len(WEIGHTS)
    keys = draws[:1] + torch.arange(len(WEIGHTS) * experts, device=draws.device)
    rows = torch.cat((keys.unsqueeze(1), draws[1:].expand(len(WEIGHTS) * experts, 3)), 1)
    return rows.view(len(WEIGHTS), experts, 4).unbind()


def _feed_forward(
    x: torch.Tensor,
    counts: torch.Tensor,
    gemms: ThreeGEMMs,
    ready: Sequence[ReadyOperands | None],
    gain: torch.Tensor | None,
    signs: torch.Tensor | None,
    draws: Sequence[torch.Tensor | None],
    w1: torch.Tensor,
    w2: torch.Tensor,
    w3: torch.Tensor,
) -> torch.Tensor:
    """x [T, D] -> W2 (silu(W1 x) * W3 x) [T, D] with each token's own expert; W1 and W3 times the gain, if any."""
    (ready1, ready2, ready3), (draws1, draws2, draws3) = ready, draws
    groups = make_groups(counts, x.shape[0], block_of_rows(gemms.mode))
    gate, up = _GroupedLinears.apply(x, gain, groups, True, gemms, (ready1, ready3), signs, (draws1, draws3), w1, w3)
    return _GroupedLinears.apply(silu(gate) * up, None, groups, False, gemms, (ready2,), signs, (draws2,), w2)[0]


@functools.cache
def _compiled(backend: str):
    return torch.compile(_feed_forward, backend=backend, fullgraph=True)


class QuantizedExperts(QuantizedLayer, nn.Module):
    """Stacked experts with parameters w1, w3 [E, H, D] and w2 [E, D, H], and a recipe for all their GEMMs."""

    _multiply = staticmethod(_feed_forward)
    fed_by: tuple[nn.Module, ...] = ()
    """The MXNorm that made x, if there is one"""

    @classmethod
    def from_experts(cls, experts: nn.Module, *, recipe="mxfp8", mode="auto") -> "QuantizedExperts":
        """Return the same experts, sharing the parameters, of a class that is also that of ``experts``.

        Raises:
            ConfigError: for an unknown recipe or mode, or features that are not whole blocks. For native products:
                for a recipe with NVFP4, or features that are not multiples of 128.
        """
        new = _empty(type(experts))
        tables = vars(nn.Module())
        new.__dict__.update({k: copy.copy(v) if k in tables else v for k, v in experts.__dict__.items()})
        new._set_recipe(recipe, mode)
        check_experts(new, new.recipe, new.mode)
        # Set from the start, because torch.compile would compile again when the attribute appears.
        new.ready: tuple[ReadyOperands, ...] | None = None
        new.set_seed(0, "")
        return new

    def __reduce__(self):
        # Copies and pickles of a class that is made at run time.
        state = self.__getstate__()
        state.pop("_multiply", None)  # a compiled function cannot be copied
        return _empty, (type(self).__bases__[1],), state

    @property
    def weights(self) -> tuple[torch.Tensor, ...]:
        """w1, w2 and w3."""
        return tuple(getattr(self, name) for name in WEIGHTS)

    def quantize_ahead(self, gemms: ThreeGEMMs) -> tuple[ReadyOperands, ...]:
        """Cast the weights, which are not DTensors, for several forwards (``mxtrain.nn.ready_weights``)."""
        return tuple(gemms.quantize_ahead([w], gain) for w, gain in self._pairs())

    @property
    def gain(self) -> torch.Tensor | None:
        """The gain of the MXNorm that made x, to be folded into w1 and w3; None without one."""
        norm = self.fed_by[0] if self.fed_by else None
        return None if norm is None or norm.is_plain else norm.gain()

    def _pairs(self) -> list[tuple[torch.Tensor, torch.Tensor | None]]:
        gain = self.gain
        return [(w, None if name == "w2" else gain) for name, w in zip(WEIGHTS, self.weights, strict=True)]

    def _ready(self) -> tuple[ReadyOperands | None, ...]:
        """The weights that were cast ahead, if they are still those of this module."""
        if self.ready is None or not all(r.are_of(p) for r, p in zip(self.ready, self._pairs(), strict=True)):
            return (None,) * len(WEIGHTS)
        return self.ready

    def forward(self, x: torch.Tensor, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Rows of tokens in the order of their experts -> the experts' results.

        Args:
            x: [T, D], bf16 or fp32.
            num_tokens_per_expert: integers [E], of which the sum is at most T. Rows beyond it give zeros.

        Raises:
            ConfigError: for features that native grouped products do not take (``check_experts``).
            ValueError: for another dtype, shape or device.
        """
        check_tensor("x", x)
        gemms = self.gemms(x.device)
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in self.weights)
        check_input(x, w1.shape[2], w1, self.recipe, gemms.mode)
        if x.ndim != 2 or num_tokens_per_expert.shape != w1.shape[:1]:
            raise ValueError(
                f"x {tuple(x.shape)} and num_tokens_per_expert {tuple(num_tokens_per_expert.shape)}: expected "
                f"[T, {w1.shape[2]}] and [{w1.shape[0]}]"
            )
        check_tiles(w1.shape[2], w1.shape[1], self.recipe, gemms.mode)
        dtype = compute_dtype(x)
        check_dtype("x under autocast", dtype, self.recipe, gemms.mode)
        signs, draws = self.signs(x.device), _draws_of_experts(self.draws(x.device), len(w1))
        settings = (gemms, self._ready(), self.gain, signs, draws)
        return self._multiply(x.to(dtype), num_tokens_per_expert, *settings, w1, w2, w3).to(x.dtype)

    def compile_products(self, backend: str = "inductor") -> None:
        """Compile what the forward computes, without this module's hooks, which may wait for the device.

        All experts share a compiled function, which compiles once more when the number of tokens changes first.
        """
        self._multiply = _compiled(backend)


@functools.cache
def _quantized(kind: type[nn.Module]) -> type[QuantizedExperts]:
    """``QuantizedExperts`` that is a ``kind`` otherwise, such as in the initialization of its weights."""
    return type(f"MX{kind.__name__}", (QuantizedExperts, kind), {"__module__": __name__})


def _empty(kind: type[nn.Module]) -> QuantizedExperts:
    return object.__new__(_quantized(kind))


def check_experts(experts: nn.Module, recipe: LinearRecipe, mode: str = "auto") -> None:
    """Raise ConfigError unless this recipe computes the GEMMs of these experts in this mode."""
    _, hidden, features = experts.w1.shape
    check_features(features, hidden, recipe)
    check_tiles(features, hidden, recipe, resolve_mode(mode) if mode == "auto" else mode)


def has_nvfp4(recipe: LinearRecipe) -> bool:
    """Whether any GEMM casts its operands to NVFP4."""
    return any(gemm.is_nvfp4 for gemm in recipe.gemms)


def check_tiles(features: int, hidden: int, recipe: LinearRecipe, mode: str) -> None:
    """Raise ConfigError for native products of experts in NVFP4, or whose features are not whole tiles of scales."""
    if mode != "native" or all(gemm.format is None for gemm in recipe.gemms):
        return
    if has_nvfp4(recipe):
        raise ConfigError(f"recipe = {recipe.name!r}: experts have no native NVFP4 products; use mode 'emulated'")
    for name, value in (("hidden features", hidden), ("features", features)):
        if value % TILE_ROWS:
            raise ConfigError(
                f"experts with {value} {name}: native grouped products need a multiple of {TILE_ROWS}; use mode "
                "'emulated', or leave the experts in high precision"
            )
