"""The three GEMMs of a linear layer, each with its operands quantized along the axis it reduces over.

X is [T, D] (tokens, input features), W is [N, D], dY is [T, N]:

    fprop   Y  = X  W^T     reduces over D
    dgrad   dX = dY W       reduces over N
    wgrad   dW = dY^T X     reduces over T

A matrix is quantized anew for every axis, from its high-precision values: a row-wise quantized X says nothing
exact about blocks along tokens.

Each GEMM has a recipe of its own, most often the same one: both its operands are cast as that says.

NVFP4 casts the same matrix differently for different GEMMs; some of these casts need numbers of the layer: ``signs`` of
the Hadamard transform on both operands of wgrad, and ``draws``, what the random bits for dY follow from.
"""

import torch
import torch.nn as nn

from mxtrain.errors import ConfigError
from mxtrain.nn.seeded import Seeded
from mxtrain.ops import nvfp4_operands
from mxtrain.ops.gemm import matmul
from mxtrain.ops.hardware import resolve_mode
from mxtrain.ops.quantize import Operand, quantize, quantize_along
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import LinearRecipe, Recipe


def quantize_activation(x: torch.Tensor, recipe: LinearRecipe, mode: str) -> Operand:
    """X as operand of fprop, where no MXNorm has made it."""
    if recipe.fprop.is_nvfp4:
        return nvfp4_operands.activation(x, mode)
    return quantize(x, recipe.fprop, mode, dim=1)


def _quantize_weight(w: torch.Tensor, recipe: Recipe, mode: str, dim: int, gain: torch.Tensor | None) -> Operand:
    if recipe.is_nvfp4:
        return nvfp4_operands.weight(w, recipe, mode, dim, gain)
    return quantize(w, recipe, mode, dim=dim, column_factor=gain)


def fprop(
    x: Operand,
    w: torch.Tensor,
    recipe: LinearRecipe,
    mode: str,
    out_dtype: torch.dtype,
    gain: torch.Tensor | None = None,
) -> torch.Tensor:
    """Y [T, N] from X quantized along D; with ``gain`` the weight is W diag(gain)."""
    return matmul(x, _quantize_weight(w, recipe.fprop, mode, 1, gain), out_dtype)


def dgrad(
    dy: Operand,
    w: torch.Tensor,
    recipe: LinearRecipe,
    mode: str,
    out_dtype: torch.dtype,
    gain: torch.Tensor | None = None,
) -> torch.Tensor:
    """dX [T, D] from dY quantized along N; with ``gain`` the weight is W diag(gain)."""
    return matmul(dy, _quantize_weight(w, recipe.dgrad, mode, 0, gain), out_dtype)


def wgrad(
    dy: Operand,
    x: torch.Tensor,
    recipe: LinearRecipe,
    mode: str,
    out_dtype: torch.dtype,
    rho: torch.Tensor | None = None,
    signs: torch.Tensor | None = None,
) -> torch.Tensor:
    """dW [N, D] from dY quantized along T; with ``rho`` the input is X diag(rho), row by row."""
    if recipe.wgrad.is_nvfp4:
        return matmul(dy, nvfp4_operands.activation_along_tokens(x, recipe.wgrad, mode, rho, signs), out_dtype)
    return matmul(dy, quantize(x, recipe.wgrad, mode, dim=0, row_factor=rho), out_dtype)


def quantize_gradient(
    dy: torch.Tensor,
    recipe: LinearRecipe,
    mode: str,
    for_dgrad: bool,
    for_wgrad: bool,
    signs: torch.Tensor | None = None,
    draws: torch.Tensor | None = None,
) -> tuple[Operand | None, Operand | None]:
    """dY as operand of dgrad and of wgrad, from one read if they have one recipe; None where it is not wanted."""
    rows, columns = (1,) * for_dgrad, (0,) * for_wgrad
    if recipe.dgrad == recipe.wgrad:
        operands = _gradient_operands(dy, recipe.dgrad, mode, rows + columns, signs, draws)
    else:
        operands = _gradient_operands(dy, recipe.dgrad, mode, rows, signs, draws)
        operands |= _gradient_operands(dy, recipe.wgrad, mode, columns, signs, draws)
    return operands.get(1), operands.get(0)


def _gradient_operands(dy, recipe: Recipe, mode: str, dims: tuple[int, ...], signs, draws) -> dict[int, Operand]:
    if not dims:
        return {}
    if recipe.is_nvfp4:
        return nvfp4_operands.gradient(dy, recipe, mode, dims, signs, draws)
    return quantize_along(dy, recipe, mode, dims)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """The dtype that an ordinary linear layer would compute ``x`` in: autocast's where it is on, else that of ``x``."""
    device_type = x.device.type
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else x.dtype


class QuantizedLinear(Seeded, nn.Linear):
    """A linear layer with a recipe and an execution mode; its subclasses say what they multiply.

    Both feature counts must be multiples of the recipe's block sizes: fprop reduces over the input features and
    dgrad over the output features.
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, recipe="mxfp8", mode="auto", **factory_kwargs
    ):
        self.recipe = get_recipe(recipe)
        self.mode = resolve_mode(mode)
        check_features(in_features, out_features, self.recipe)
        super().__init__(in_features, out_features, bias, **factory_kwargs)
        self.set_seed(0, "")

    @classmethod
    def from_linear(cls, linear: nn.Linear, *, recipe="mxfp8", mode="auto"):
        """The same layer, sharing the parameters of ``linear`` (which may be on the meta device)."""
        new = cls(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            recipe=recipe,
            mode=mode,
            device="meta",
        )
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}, mode={self.mode}"


def check_features(in_features: int, out_features: int, recipe: LinearRecipe) -> None:
    """Raise ConfigError unless both are multiples of the block sizes of fprop and of every GEMM that is quantized."""
    for of_gemm in recipe.gemms:
        if of_gemm.format is None and of_gemm != recipe.fprop:
            continue
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value % of_gemm.block_size:
                raise ConfigError(
                    f"{name} = {value} is not a multiple of the block size {of_gemm.block_size} "
                    f"of recipe {of_gemm.name!r}"
                )
