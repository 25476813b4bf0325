"""The experts of a mixture, their weights stacked, with quantized GEMMs: fprop, dgrad and wgrad of every expert.

Each expert is a feed-forward network with a gate, W2 (silu(W1 x) * W3 x). Its results and gradients have the bits of
two ``MXLinear`` on its tokens alone: W1 and W3, one below the other, and W2. With tensor scales in a recipe they are
three, because such a scale is that of one matrix of one expert. All experts transform with the signs of the layer;
matrix i (w1, w2, w3: 0, 1, 2) of expert e of E rounds stochastically with the layer's key plus i E + e.
"""

import copy
import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import silu

from mxtrain.errors import ConfigError
from mxtrain.formats.gemm import (
    TILE_ROWS,
    Groups,
    block_of_rows,
    collect,
    make_groups,
    matmul_rows,
    matmul_tokens,
    split_rows,
)
from mxtrain.formats.hardware import MERGED, resolve_mode
from mxtrain.formats.recipe import DEFAULT_RECIPE, LinearRecipe
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.normed_input import RoutedRows
from mxtrain.nn.three_gemms import (
    QuantizedLayer,
    ReadyOperands,
    ThreeGEMMs,
    check_dtype,
    check_features,
    check_input,
    compute_dtype,
    weight_of,
)
from mxtrain.norms.mxnorm import fold_backward

WEIGHTS = ("w1", "w2", "w3")


@untraced
class _GroupedLinear(torch.autograd.Function):
    """X, W_i [E, N_i, D] -> Y_i: each expert's rows times its matrices, one below the other in one GEMM each way.

    With a ``gain`` [D], W_i stands for W_i diag(gain).

    With ``from_tokens``, X [T, D] are the rows of the tokens and Y_i [P, N_i] have padding. Else X [P, D] has padding
    and the only Y [T, N] has the rows of the tokens.
    """

    @staticmethod
    def forward(
        ctx,
        x: torch.Tensor,
        gain: torch.Tensor | None,
        groups: Groups,
        from_tokens: bool,
        gemms: ThreeGEMMs,
        ready: ReadyOperands | None,
        signs: torch.Tensor | None,
        draws: Sequence[torch.Tensor | None],
        *ws: torch.Tensor,
    ):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, gain, signs, *groups, *ws)
        ctx.from_tokens, ctx.gemms, ctx.ready, ctx.draws = from_tokens, gemms, ready, draws
        xq = gemms.quantize_activation(x, groups.source if from_tokens else None, groups.ends)
        w = gemms.quantize_weights(ws, gain, (1,))[1] if ready is None else ready.fprop[0]
        y = matmul_rows(xq, w, groups.ends, x.dtype)
        # Not views for autograd, which would forbid writes to them.
        return y.unsafe_split_with_sizes([w.shape[1] for w in ws], 1) if from_tokens else (collect(y, groups),)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, *dys: torch.Tensor):
        x, gain, signs, places, ends, source, *ws = saved
        gemms, (needs_x, needs_gain, *_) = ctx.gemms, ctx.needs_input_grad
        source_of_x, source_of_dy = (source, None) if ctx.from_tokens else (None, source)
        needs_w = (any(ctx.needs_input_grad[-len(ws) :]) or needs_gain) and gemms.runs_wgrad
        for_dx, for_dw = gemms.quantize_gradients(dys, needs_x, needs_w, signs, ctx.draws, source_of_dy, ends)
        dx = dgain = None
        dws: list[torch.Tensor | None] = [None] * len(ws)
        if for_dx is not None:
            w = gemms.quantize_weights(ws, gain, (0,))[0] if ctx.ready is None else ctx.ready.dgrad
            dx = matmul_rows(for_dx, w, ends, x.dtype)
            dx = collect(dx, Groups(places, ends, source)) if ctx.from_tokens else dx
        if for_dw is not None:
            along_tokens = gemms.quantize_along_tokens(x, None, signs, source_of_x, ends)
            for i, (part, w) in enumerate(zip(split_rows(for_dw, [w.shape[1] for w in ws]), ws, strict=True)):
                dw = matmul_tokens(part, along_tokens, ends, x.dtype)
                if gain is None:
                    dws[i] = dw.to(w.dtype)
                else:
                    dw, of_gain = fold_backward(dw.flatten(0, 1), w.flatten(0, 1), gain, gemms.mode)
                    dws[i], dgain = dw.view(w.shape), of_gain if dgain is None else dgain + of_gain
        return dx, dgain, *[None] * 6, *dws


def _draws_of_experts(draws: torch.Tensor | None, experts: int) -> Sequence[torch.Tensor | None]:
    """A layer's draws, int64 [4] -> those of every expert for w1, w2 and w3, each [E, 4]."""
    if draws is None:
        return (None,) * len(WEIGHTS)
    keys = draws[:1] + torch.arange(len(WEIGHTS) * experts, device=draws.device)
    rows = torch.cat((keys.unsqueeze(1), draws[1:].expand(len(WEIGHTS) * experts, 3)), 1)
    return rows.view(len(WEIGHTS), experts, 4).unbind()


def _feed_forward(
    x: torch.Tensor | RoutedRows,
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
    if isinstance(x, RoutedRows):
        x = x.values()  # here, so that decoding is one kernel where this is compiled
    (*of_input, of_hidden), (draws1, draws2, draws3) = ready, draws
    groups = make_groups(counts, x.shape[0], block_of_rows(gemms.mode))
    from_tokens = x, gain, groups, True, gemms
    if len(of_input) > 1:
        (gate,) = _GroupedLinear.apply(*from_tokens, of_input[0], signs, (draws1,), w1)
        (up,) = _GroupedLinear.apply(*from_tokens, of_input[1], signs, (draws3,), w3)
    else:
        gate, up = _GroupedLinear.apply(*from_tokens, *of_input, signs, (draws1, draws3), w1, w3)
    return _GroupedLinear.apply(silu(gate) * up, None, groups, False, gemms, of_hidden, signs, (draws2,), w2)[0]


@functools.cache
def _compiled(backend: str):
    return torch.compile(_feed_forward, backend=backend, fullgraph=True)


class QuantizedExperts(QuantizedLayer, nn.Module):
    """Stacked experts with parameters w1, w3 [E, H, D] and w2 [E, D, H], and a recipe for all their GEMMs."""

    _multiply = staticmethod(_feed_forward)
    fed_by: tuple[nn.Module, ...] = ()
    """The MXNorm that made x, if there is one"""

    @classmethod
    def from_experts(cls, experts: nn.Module, *, recipe=DEFAULT_RECIPE, mode="auto") -> "QuantizedExperts":
        """Return the same experts, sharing the parameters, of a class that is also that of ``experts``.

        Raises:
            ConfigError: for an unknown recipe or mode, or features that are not whole blocks. For native products:
                for a recipe with tensor scales, or features that are not multiples of 128.
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
        return tuple(getattr(self, name) for name in weight_names(self))

    def quantize_ahead(self, gemms: ThreeGEMMs) -> tuple[ReadyOperands, ...]:
        """Cast the weights, which are not DTensors, for several forwards (``mxtrain.nn.ready_weights``)."""
        return tuple(gemms.quantize_ahead(ws, norm) for ws, norm in self._products())

    @property
    def folded_norm(self) -> nn.Module | None:
        """The MXNorm that made x, whose gain is folded into w1 and w3; None without one."""
        norm = self.fed_by[0] if self.fed_by else None
        return None if norm is None or norm.is_plain else norm

    def _products(self) -> tuple[tuple[tuple[torch.Tensor, ...], nn.Module | None], ...]:
        """The weights of each product and the norm whose gain they are folded with."""
        (w1, w2, w3), norm = self.weights, self.folded_norm
        of_input = ((w1,), norm), ((w3,), norm)
        return *(of_input if self.recipe.tensor_scaled else (((w1, w3), norm),)), ((w2,), None)

    def _ready(self) -> tuple[ReadyOperands | None, ...]:
        """The weights that were cast ahead, if they are still those of this module."""
        parameters = [(*ws, weight_of(norm)) for ws, norm in self._products()]
        if self.ready is None or not all(r.are_of(p) for r, p in zip(self.ready, parameters, strict=True)):
            return (None,) * len(parameters)
        return self.ready

    def forward(self, x: torch.Tensor | RoutedRows, num_tokens_per_expert: torch.Tensor) -> torch.Tensor:
        """Rows of tokens in the order of their experts -> the experts' results.

        Args:
            x: [T, D], bf16 or fp32; as ``RoutedRows``, codes of such rows in the order of experts.
            num_tokens_per_expert: integers [E], of which the sum is at most T. Rows beyond it give zeros.

        Raises:
            ConfigError: for features that native grouped products do not take (``check_experts``).
            ValueError: for another dtype, shape or device.
        """
        rows, x = x, x.h if isinstance(x, RoutedRows) else x
        gemms = self.gemms(x.device)
        w1, w2, w3 = (w.to_local() if isinstance(w, DTensor) else w for w in self.weights)
        check_input(x, w1.shape[2], w1, self.recipe, gemms.mode)
        if x.ndim != 2 or num_tokens_per_expert.shape != w1.shape[:1]:
            raise ValueError(
                f"x and num_tokens_per_expert have shapes {tuple(x.shape)} and {tuple(num_tokens_per_expert.shape)}; "
                f"they must be [T, {w1.shape[2]}] and [{w1.shape[0]}]"
            )
        check_tiles(w1.shape[2], w1.shape[1], self.recipe, gemms.mode)
        dtype = compute_dtype(x)
        check_dtype("x under autocast", dtype, self.recipe, gemms.mode)
        rows = rows._replace(h=x.to(dtype)) if isinstance(rows, RoutedRows) else x.to(dtype)
        signs, draws = self.signs(x.device), _draws_of_experts(self.draws(x.device), len(w1))
        norm = self.folded_norm
        settings = (gemms, self._ready(), None if norm is None or self.gathers_codes else norm.gain(), signs, draws)
        return self._multiply(rows, num_tokens_per_expert, *settings, w1, w2, w3).to(x.dtype)

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


def weight_names(experts: nn.Module) -> tuple[str, ...]:
    """The names of w1, w2 and w3 in stacked experts, which may name the dimensions, too: "w1_EFD"."""
    return tuple(next((own for own in experts._parameters if own.startswith(name)), name) for name in WEIGHTS)


def check_experts(experts: nn.Module, recipe: LinearRecipe, mode: str = "auto") -> None:
    """Raise ConfigError unless this recipe computes the GEMMs of these experts in this mode."""
    _, hidden, features = getattr(experts, weight_names(experts)[0]).shape
    check_features(features, hidden, recipe)
    check_tiles(features, hidden, recipe, resolve_mode(mode) if mode == "auto" else mode)


def check_tiles(features: int, hidden: int, recipe: LinearRecipe, mode: str) -> None:
    """Raise ConfigError for merged products, and native ones with tensor scales or without whole tiles of scales."""
    if mode == MERGED and recipe.quantizes:
        raise ConfigError(f"experts have no grouped products in mode {mode!r}; use mode 'emulated'")
    if mode != "native" or not recipe.quantizes:
        return
    if fmt := recipe.tensor_scaled:
        raise ConfigError(f"recipe = {recipe.name!r}: experts have no native {fmt} products; use mode 'emulated'")
    for name, value in (("hidden features", hidden), ("features", features)):
        if value % TILE_ROWS:
            raise ConfigError(
                f"experts with {value} {name}: native grouped products need a multiple of {TILE_ROWS}; use mode "
                "'emulated', or leave the experts in high precision"
            )


@contextmanager
def kept_buffers(parts: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Give the buffers of a model, or of its parts, their values back after the context.

    A pass beside training must not change them: mixtures count the tokens of every forward in one.
    """
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
