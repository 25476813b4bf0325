"""What every recipe would cost a model: the errors of each layer's three GEMMs, on the same tensors.

One forward and one backward in high precision give a sample of every layer's X, W and dY (``Numerics``). Every recipe
then casts and multiplies this sample with the functions of training. The error of a GEMM is

    ||Q - G|| / ||G||        G its product in fp32, Q what the recipe's operands give; Frobenius norms

After an MXNorm, X stands for X diag(rho) and W for W diag(gain), with the rho that the recipe's own blocks estimate, so
the error is that of the casts. Stacked experts are one layer, with the errors of the whole feed-forward network.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch

from mxtrain.diagnostics.experts import expert_results
from mxtrain.diagnostics.linears import Input, linear_casts, product_totals
from mxtrain.diagnostics.recording import Numerics
from mxtrain.diagnostics.totals import norm
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.recipe import GEMMS, LinearRecipe
from mxtrain.formats.schedule import LayerState
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.three_gemms import QuantizedLayer, QuantizedLinear, ThreeGEMMs

UNQUANTIZED = "unquantized"


class Rehearsal(Numerics):
    """Measures the layers of a model that was converted with recipe "unquantized", under each of ``recipes``.

    ``errors`` is layer, name of the recipe -> the errors of fprop, dgrad and wgrad, fp64 [3]; 0 in high precision.
    """

    def __init__(self, recipes: Mapping[str, LinearRecipe], tokens: int, model: torch.nn.Module, **others):
        super().__init__(1, None, tokens, [model], **others)
        self._hooks = [(module, hook) for module, hook in self._hooks if isinstance(module, QuantizedLayer)]
        self.recipes, self.errors = recipes, {}

    def _measure_linear(self, fqn: str, linear: QuantizedLinear, given: Input, dy: torch.Tensor, signs) -> None:
        weight, zero = linear.parts()[0].detach(), dy.new_zeros((), dtype=torch.float64)
        for name, recipe in self.recipes.items():
            # Without gradients, a layer takes no random bits.
            with _gemms_of(linear, recipe, dy.device) as gemms, torch.enable_grad():
                bits = linear.signs(dy.device), linear.draws(dy.device)
            if (old := given.estimate) is not None:  # the sample as an MXNorm of this recipe gives it
                estimate = RMSEstimate.for_recipe(gemms.recipe.fprop, old.p, old.estimator, old.eps, old.ratio)
                given = replace(given, estimate=estimate)
                given = replace(given, rho=given.normalized(gemms)[1])
            casts = linear_casts(gemms, given, weight, dy, *bits)
            norms = {gemm: product_totals(*own.values()).norms for gemm, own in casts.items()}
            found = {gemm: own["noise"] / own["signal"] for gemm, own in norms.items()}
            self.errors[fqn, name] = torch.stack([found.get(gemm, zero) for gemm in GEMMS])

    def _measure_experts(self, fqn: str, experts: QuantizedExperts, rows, counts, dy) -> None:
        def results(recipe: LinearRecipe) -> list[torch.Tensor]:
            with _gemms_of(experts, recipe, rows.device) as gemms:
                return expert_results(experts, gemms, rows, counts, dy)

        exact = results(experts.recipe)
        for name, recipe in self.recipes.items():
            y, dx, *dws = zip(results(recipe), exact)
            dw = [torch.cat([part.flatten() for part in parts]) for parts in zip(*dws)]
            self.errors[fqn, name] = torch.stack([norm(q - g) / norm(g) for q, g in (y, dx, dw)])


@contextmanager
def _gemms_of(layer: QuantizedLayer, recipe: LinearRecipe, device: torch.device) -> Iterator[ThreeGEMMs]:
    """Give a layer this recipe for the time of the context, in plain PyTorch, for which no kernel is compiled."""
    before = layer.recipe
    layer.take(LayerState(recipe))
    try:
        yield replace(layer.gemms(device), mode="reference", runs_wgrad=True)
    finally:
        layer.take(LayerState(before))
