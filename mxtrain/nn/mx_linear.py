"""A linear layer whose three GEMMs are quantized, for inputs that no MXNorm has prepared."""

import torch
from torch.autograd.function import once_differentiable

from mxtrain.nn.three_gemms import (
    QuantizedLinear,
    compute_dtype,
    dgrad,
    fprop,
    quantize_activation,
    quantize_gradient,
    wgrad,
)
from mxtrain.recipes.recipe import LinearRecipe


class _MXLinearFunction(torch.autograd.Function):
    """X [T, D], W [N, D] -> Y [T, N] in the dtype of X; the casts pass gradients straight through."""

    @staticmethod
    def forward(ctx, x: torch.Tensor, weight: torch.Tensor, signs, draws, recipe: LinearRecipe, mode: str):
        ctx.save_for_backward(x, weight, signs, draws)
        ctx.recipe, ctx.mode = recipe, mode
        return fprop(quantize_activation(x, recipe, mode), weight, recipe, mode, x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: torch.Tensor):
        x, weight, signs, draws = ctx.saved_tensors
        recipe, mode = ctx.recipe, ctx.mode
        for_dx, for_dw = quantize_gradient(dy, recipe, mode, *ctx.needs_input_grad[:2], signs, draws)
        dx = None if for_dx is None else dgrad(for_dx, weight, recipe, mode, x.dtype)
        dw = None if for_dw is None else wgrad(for_dw, x, recipe, mode, x.dtype, signs=signs).to(weight.dtype)
        return dx, dw, None, None, None, None


class MXLinear(QuantizedLinear):
    """``torch.nn.Linear`` with operands cast as its recipe says: parameters, FQNs and shapes are unchanged.

    The weight is cast from its own dtype (fp32 master weights are not rounded to bf16 on the way). Under autocast the
    input is taken, and the result given, in autocast's dtype, as ``torch.nn.Linear`` does.

    Args:
        in_features, out_features: multiples of the recipe's block sizes.
        bias: whether to add a bias, in high precision.
        recipe: a name, a spec with a name for each GEMM (see ``mxtrain.recipes.parse.get_recipe``), or a Recipe.
        mode: "auto", "native", "emulated" or "reference".

    Raises:
        ConfigError: for an unknown recipe or mode, a mode the hardware lacks, or features that no block divides.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features] -> [..., out_features]."""
        x = x.to(compute_dtype(x))
        rows, signs, draws = x.reshape(-1, x.shape[-1]), self.signs(x.device), self.draws(x.device)
        y = _MXLinearFunction.apply(rows, self.weight, signs, draws, self.recipe, self.mode)
        y = y.view(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias.to(y.dtype)
