"""The casts and results of quantized experts, expert by expert, and the choices of their routers.

Experts run once more when the gradient of their results arrives, forward and backward, on the rows that they had: with
their own recipe, of which every cast is compared with its values, and without casts. So errors of results are those of
all casts of the feed-forward network together: of W2 (silu(W1 x) * W3 x), of its gradient of x, and of those of w1, w2
and w3. Of an MXNorm's result, x are the values that the norm has cast, which no second cast changes: only the casts of
W2's input count then.
"""

import math
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.diagnostics.totals import Totals, ratio
from mxtrain.formats.gemm import block_of_rows, make_groups
from mxtrain.formats.hardware import VALUE_MODES
from mxtrain.formats.matrices import CastSpec, Operand, at_least_fp32
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.experts import WEIGHTS, QuantizedExperts, weight_names
from mxtrain.nn.normed_input import NormedInput
from mxtrain.nn.split import own_part
from mxtrain.nn.three_gemms import ThreeGEMMs

_NAMES = {
    ("input", 1): "fprop_input",
    ("weight", 1): "fprop_weight",
    ("gradient", 1): "dgrad_grad",
    ("weight", 0): "dgrad_weight",
    ("gradient", 0): "wgrad_grad",
    ("input", 0): "wgrad_input",
}


class _ByExpert:
    """Squared norms of values and of their errors, by name: fp64 [2, E].

    Args:
        experts: their number E.
        expert_of_row: int64 [P], the expert of every row of a matrix with padding, E for rows of none.
    """

    def __init__(self, experts: int, expert_of_row: torch.Tensor):
        self.experts, self.expert_of_row, self.squares = experts, expert_of_row, {}

    def add(self, name: str, values: torch.Tensor, image: torch.Tensor, owner: torch.Tensor | None, scales=None):
        """Add rows of ``values`` and what became of them. Without their experts, ``owner``, they are E equal parts.

        ``scales``: of an image without its exact tensor scales, fp32 [E].
        """
        if owner is None:
            owner = torch.arange(self.experts, device=values.device).repeat_interleave(len(values) // self.experts)
        if scales is not None:
            image = image * scales.view(-1)[owner.clamp(max=self.experts - 1)].unsqueeze(1)
        both = (values.flatten(1), (image - values).flatten(1))
        squares = torch.stack([torch.linalg.vector_norm(each, dim=1).double().square() for each in both])
        sums = squares.new_zeros(2, self.experts + 1).index_add_(1, owner, squares)[:, : self.experts]
        self.squares[name] = self.squares.get(name, 0) + sums

    def totals(self) -> Totals:
        worst = {name: torch.where(s > 0, n / s, 0).sqrt().amax() for name, (s, n) in self.squares.items()}
        roots = {name: sums.sum(1).sqrt().unbind() for name, sums in self.squares.items()}
        norms = {f"{name} {kind}": root for name in roots for kind, root in zip(("signal", "noise"), roots[name])}
        return Totals({}, {}, worst, norms)


@dataclass(frozen=True, kw_only=True)
class _MeasuredGEMMs(ThreeGEMMs):
    """GEMMs that measure their casts, but for those after a Hadamard transform, and for x if it ``is_cast``."""

    found: _ByExpert
    is_cast: bool

    def _cast(self, parts, recipes, spec: CastSpec) -> dict[int, Operand]:
        operands = super()._cast(parts, recipes, spec)
        if self.is_cast and spec.role == "input" and spec.source is not None:
            return operands
        values = spec.scaled(spec.joined([at_least_fp32(part) for part in parts]))
        for dim, operand in operands.items():
            if recipes[dim].format is not None and not (dim == 0 and recipes[dim].hadamard):
                image = operand.data if dim == 1 else operand.data.t()
                owner = None if spec.role == "weight" else self.found.expert_of_row
                self.found.add(_NAMES[spec.role, dim], values, image, owner, operand.tensor_scale)
        return operands


def expert_totals(experts: QuantizedExperts, x: torch.Tensor, counts: torch.Tensor, dy: torch.Tensor) -> Totals:
    """Measure experts on the rows x [T, D], of which each has counts [E], with the gradient dy [T, D] of the results.

    The weights are whole, or this process's experts or parts of them.
    """
    gemms = replace(experts.gemms(x.device), runs_wgrad=True)
    if gemms.mode not in VALUE_MODES:
        gemms = replace(gemms, mode="emulated")
    places, ends, source = make_groups(counts, len(x), block_of_rows(gemms.mode))
    rows = torch.arange(len(source), dtype=ends.dtype, device=x.device)
    found = _ByExpert(len(counts), torch.searchsorted(ends, rows, right=True))
    own = {name: getattr(gemms, name) for name in ("recipe_key", "mode", "split")}
    is_cast = any(not norm.is_plain and not norm.scores_first for norm in experts.fed_by)
    quantized = expert_results(experts, _MeasuredGEMMs(**own, found=found, is_cast=is_cast), x, counts, dy)
    exact = expert_results(experts, replace(gemms, recipe_key=get_recipe("unquantized").key), x, counts, dy)
    owner = found.expert_of_row[places]
    for gemm, owners, result, wanted in zip(
        ("fprop", "dgrad", *["wgrad"] * len(WEIGHTS)), (owner, owner, *[None] * len(WEIGHTS)), quantized, exact
    ):
        found.add(gemm, at_least_fp32(wanted), result, owners)
    return found.totals()


def expert_results(experts, gemms: ThreeGEMMs, x: torch.Tensor, counts: torch.Tensor, dy: torch.Tensor):
    """Return y and the gradients of x, w1, w2 and w3, without hooks."""
    weights = [own_part(weight).detach().requires_grad_() for weight in experts.weights]
    parameters = dict(zip(weight_names(experts), weights))
    again = _changed(experts, gemms=lambda device: gemms, ready=None, _parameters=parameters)
    x = x.detach().requires_grad_()
    with torch.enable_grad():
        y = again.forward(x, counts)
    return [y.detach(), *torch.autograd.grad(y, [x, *weights], dy)]


def _changed(module: nn.Module, **attributes) -> nn.Module:
    """A module with the same contents but for some attributes; without its class's ``__new__``, which FSDP changes.

    It has its class's forward: TorchTitan 0.3 sets one on a module, which would run the module itself.
    """
    new = object.__new__(type(module))
    new.__dict__ = {**vars(module), **attributes}
    new.__dict__.pop("forward", None)
    return new


def expert_figures(totals: Totals) -> dict[str, float]:
    """Return the figures of experts by name, such as "fprop_error" and "fprop_error_worst_expert"."""
    figures = {}
    for name, worst in totals.largest.items():
        signal, noise = totals.norms[f"{name} signal"], totals.norms[f"{name} noise"]
        if "_" not in name:
            figures |= {f"{name}_error": ratio(noise, signal), f"{name}_error_worst_expert": worst}
        elif signal > 0 and noise > 0:
            figures[f"{name}_sqnr_db"] = 20 * math.log10(signal / noise)
            figures[f"{name}_sqnr_db_worst_expert"] = -20 * math.log10(worst)
    return figures


def router_totals(
    router: nn.Module, x: NormedInput | torch.Tensor, bias: torch.Tensor | None, chosen: torch.Tensor
) -> Totals:
    """Count the tokens of every expert in the choices of a router, [..., K].

    After an MXNorm, also count the tokens that have the experts which RMSNorm and the gate choose in fp64.
    """
    counts = torch.zeros(router.num_experts, dtype=torch.float64, device=chosen.device)
    counts.index_add_(0, chosen.flatten(), counts.new_ones(chosen.numel()))
    sums = {f"expert {number}": count for number, count in enumerate(counts.unbind())}
    if isinstance(x, NormedInput):
        exact = _changed(router, gate=partial(_exact_logits, router.gate))
        same = (exact.forward(x, bias)[1].sort(-1).values == chosen.sort(-1).values).all(-1)
        sums |= {"tokens": float(same.numel()), "same": same.double().sum()}
    return Totals(sums, {}, {})


def _exact_logits(gate: nn.Linear, x: NormedInput) -> torch.Tensor:
    norm = x.made_by
    gain, weight, bias = (t if t is None else own_part(t).double() for t in (norm.gain(), gate.weight, gate.bias))
    return F.linear(F.rms_norm(x.x.double(), norm.normalized_shape, gain, norm.plain_eps), weight, bias)


def router_figures(totals: Totals) -> dict[str, float]:
    counts = [count for name, count in totals.sums.items() if name.startswith("expert ")]
    figures = {
        "busiest_expert": ratio(max(counts), sum(counts)),
        "experts_without_tokens": counts.count(0) / len(counts),
    }
    if "same" in totals.sums:
        figures["routing_agreement"] = totals.sums["same"] / totals.sums["tokens"]
    return figures
