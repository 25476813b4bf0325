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
from mxtrain.diagnostics.linears import Gradient, Input
from mxtrain.diagnostics.recording import Numerics
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import matmul
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.formats.recipe import LinearRecipe
from mxtrain.formats.schedule import LayerState
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.three_gemms import QuantizedLayer, QuantizedLinear, ThreeGEMMs

UNQUANTIZED = "unquantized"


class Rehearsal(Numerics):
    """Measures the layers of a model that was converted with recipe "unquantized", under each of ``recipes``.

    ``errors`` is layer, name of the recipe -> the errors of fprop, dgrad and wgrad, fp64 [3].
    """

    def __init__(self, recipes: Mapping[str, LinearRecipe], tokens: int, model: torch.nn.Module, **others):
        super().__init__(1, None, tokens, [model], **others)
        self._hooks = [(module, hook) for module, hook in self._hooks if isinstance(module, QuantizedLayer)]
        self.recipes, self.errors = recipes, {}

    def _measure_linear(self, fqn: str, linear: QuantizedLinear, given: Input, dy: torch.Tensor, signs) -> None:
        weight, exact = linear.parts()[0].detach(), {}
        for name, recipe in self.recipes.items():
            # Without gradients, a layer takes no random bits.
            with _gemms_of(linear, recipe, dy.device) as gemms, torch.enable_grad():
                gradient = Gradient(dy, linear.signs(dy.device), linear.draws(dy.device))
            own = _estimated_by(given, gemms)
            key = own.estimate and own.estimate.key
            if key not in exact:
                exact[key] = _exact_products(own, weight, dy)
            products = _products(gemms, own, weight, gradient)
            self.errors[fqn, name] = _errors(products, exact[key])

    def _measure_experts(self, fqn: str, experts: QuantizedExperts, rows, counts, dy) -> None:
        exact = expert_results(experts, replace(experts.gemms(rows.device), runs_wgrad=True), rows, counts, dy)
        for name, recipe in self.recipes.items():
            with _gemms_of(experts, recipe, rows.device) as gemms:
                products = expert_results(experts, gemms, rows, counts, dy)
            y, dx, *dws = zip(products, exact)
            of_weights = [torch.cat([part.flatten().float() for part in parts]) for parts in zip(*dws)]
            self.errors[fqn, name] = _errors(*zip(y, dx, of_weights))


@contextmanager
def _gemms_of(layer: QuantizedLayer, recipe: LinearRecipe, device: torch.device) -> Iterator[ThreeGEMMs]:
    """Give a layer this recipe for the time of the context."""
    before = layer.recipe
    layer.take(LayerState(recipe))
    try:
        gemms = layer.gemms(device)
        yield replace(gemms, mode="emulated" if gemms.mode == "native" else gemms.mode, runs_wgrad=True)
    finally:
        layer.take(LayerState(before))


def _estimated_by(given: Input, gemms: ThreeGEMMs) -> Input:
    """The sample as an MXNorm of this recipe gives it; unchanged without an MXNorm."""
    if given.estimate is None:
        return given
    old, fprop = given.estimate, gemms.recipe.fprop
    estimate = RMSEstimate.for_recipe(fprop, old.p, old.estimator, old.eps)
    given = replace(given, estimate=estimate)
    return replace(given, rho=given.normalized(gemms)[1])


def _exact_products(given: Input, weight: torch.Tensor, dy: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Y, dX and dW in fp32."""
    x, dy = given.matrix.values, at_least_fp32(dy)
    w = at_least_fp32(weight) if given.gain is None else at_least_fp32(weight) * given.gain
    return tuple(matmul(a, b, torch.float32) for a, b in ((x, w), (dy, w.t()), (dy.t(), x.t())))


def _products(gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, of: Gradient) -> tuple[torch.Tensor, ...]:
    """Y, dX and dW of the recipe's operands, in fp32."""
    dtype = torch.float32
    x = gemms.quantize_activation(given.x) if given.estimate is None else given.normalized(gemms)[0]
    dy_rows, dy_columns = gemms.quantize_gradients([of.dy], True, True, of.signs, [of.draws])
    (y,) = gemms.fprop(x, [weight], dtype, given.gain)
    x_columns = gemms.quantize_along_tokens(given.x, given.rho, of.signs, estimate=given.estimate)
    return y, gemms.dgrad(dy_rows, [weight], dtype, given.gain), gemms.wgrad(dy_columns, x_columns, dtype)


def _errors(products, exact) -> torch.Tensor:
    found = [
        torch.linalg.vector_norm(q.float() - g.float()) / torch.linalg.vector_norm(g.float())
        for q, g in zip(products, exact)
    ]
    return torch.stack(found).double()
