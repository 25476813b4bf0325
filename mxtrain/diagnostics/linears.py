"""The six casts and three GEMMs of a quantized linear, measured on a sample of its input and of its output gradient.

    fprop   Y  = X  W^T     casts "fprop_input", "fprop_weight"
    dgrad   dX = dY W       casts "dgrad_grad", "dgrad_weight"
    wgrad   dW = dY^T X     casts "wgrad_grad", "wgrad_input"

After an MXNorm, X stands for X diag(rho) and fprop's and dgrad's W for W diag(gain). Where wgrad's operands are
Hadamard-transformed before their cast, values and images are those after the transform.

The operands come from the functions that training calls (``mxtrain.ops.quantize``). Mode "native" is measured through
the images of mode "emulated", which hold the same values. A dynamic tensor scale of NVFP4 is that of the sample.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from mxtrain.diagnostics.casts import block_scales, cast_figures, cast_totals
from mxtrain.diagnostics.products import norm_to_noise, product_totals, relative_error
from mxtrain.diagnostics.totals import Totals
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.ops import quantize
from mxtrain.ops.collectives import largest
from mxtrain.ops.gemm import Operand
from mxtrain.ops.mxnorm import normalize
from mxtrain.recipes.recipe import Recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import nvfp4
from mxtrain.reference.casts import at_least_fp32
from mxtrain.reference.hadamard import hadamard, pad, unpack_signs
from mxtrain.reference.mxnorm import scale_rows


@dataclass(frozen=True)
class Input:
    """A sample of what a linear gets, R tokens.

    Attributes:
        x: [R, D]; the input of the norm if an MXNorm comes first.
        rho: inverse RMS estimates, fp32 [R]; None without an MXNorm.
        gain: the norm's gain [D]; None without.
        estimate: the norm's estimate; None without an MXNorm.
        signs: of the Hadamard transform, int64 []; None without.
        draws: of stochastic rounding, int64 [4]; None without.
    """

    x: torch.Tensor
    rho: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    estimate: RMSEstimate | None = None
    signs: torch.Tensor | None = None
    draws: torch.Tensor | None = None


class _Cast(NamedTuple):
    values: torch.Tensor
    operand: Operand
    group: str | None
    tiles: bool = False
    tensor_scale: float | None = None
    """NVFP4: known before the cast; None if it comes from the values"""


def linear_totals(gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, dy: torch.Tensor) -> dict[str, Totals]:
    """Measure a linear's casts and GEMMs; by name. GEMMs without a format are left out.

    Args:
        gemms: recipe, mode and split of the linear.
        weight: W [N, D], or this process's part.
        dy: the output gradient of the sample, [R, N].
    """
    if gemms.mode == "native":
        gemms = replace(gemms, mode="emulated")
    found = {}
    for gemm, a_name, a, b_name, b in _operands(gemms, given, weight, dy):
        recipe = getattr(gemms.recipe, gemm)
        for name, cast in ((a_name, a), (b_name, b)):
            found[f"{gemm}_{name}"] = _cast_totals(cast, recipe)
        found[gemm] = product_totals(a.values, b.values, a.operand, b.operand)
    return found


def linear_figures(found: dict[str, Totals]) -> dict[str, float]:
    """Return the figures of a linear by name, such as "fprop_input_sqnr_db", "fprop_error", "grad_norm_to_noise"."""
    figures = {}
    for name, totals in found.items():
        if "_" in name:
            figures |= {f"{name}_{figure}": value for figure, value in cast_figures(totals).items()}
        else:
            figures[f"{name}_error"] = relative_error(totals)
    if "wgrad" in found:
        figures["grad_norm_to_noise"] = norm_to_noise(found["wgrad"])
    return figures


def _operands(gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, dy: torch.Tensor) -> Iterator[tuple]:
    """For each GEMM with a format: its name, then name and cast of each of its two operands."""
    recipe, mode, split = gemms.recipe, gemms.mode, gemms.split
    x = at_least_fp32(given.x) if given.rho is None else scale_rows(given.x, given.rho)
    w = at_least_fp32(weight) if given.gain is None else at_least_fp32(weight) * given.gain
    dgrad, wgrad = recipe.dgrad.format is not None, recipe.wgrad.format is not None
    dy_rows, dy_columns = quantize.gradient(dy, recipe, mode, dgrad, wgrad, given.signs, given.draws, split.dy)
    dy = at_least_fp32(dy)
    if (fprop := recipe.fprop).format is not None:
        weight_cast = quantize.weight(weight, fprop, mode, 1, given.gain, split.w)
        yield "fprop", "input", _input(gemms, given, x), "weight", _Cast(w, weight_cast, split.w, fprop.weight_tiles)
    if dgrad:
        weight_cast = quantize.weight(weight, recipe.dgrad, mode, 0, given.gain, split.w)
        of_weight = _Cast(w.t(), weight_cast, split.w, recipe.dgrad.weight_tiles)
        yield "dgrad", "grad", _Cast(dy, dy_rows, split.dy), "weight", of_weight
    if wgrad:
        x_columns = quantize.activation_along_tokens(given.x, recipe.wgrad, mode, given.rho, given.signs, split.x)
        of_dy, of_x = (_along_tokens(values, recipe.wgrad, given.signs) for values in (dy, x))
        yield "wgrad", "grad", _Cast(of_dy, dy_columns, split.dy), "input", _Cast(of_x, x_columns, split.x)


def _input(gemms: ThreeGEMMs, given: Input, x: torch.Tensor) -> _Cast:
    """The cast of fprop's input; ``x`` are its values."""
    fprop, estimate = gemms.recipe.fprop, given.estimate
    if estimate is None:
        return _Cast(x, quantize.activation(given.x, fprop, gemms.mode, gemms.split.x), gemms.split.x)
    static = None
    if fprop.tensor_scale == "static":
        static = nvfp4.static_tensor_scale(x.shape[-1], estimate.p, estimate.estimator, estimate.constant)
    return _Cast(x, normalize(given.x, estimate, fprop, gemms.mode)[0], gemms.split.x, tensor_scale=static)


def _along_tokens(x: torch.Tensor, recipe: Recipe, signs: torch.Tensor | None) -> torch.Tensor:
    """x [R, C] -> what is cast [C, R]: the transform of x if the recipe says so."""
    return (hadamard(pad(x, 0), unpack_signs(signs), 0) if recipe.hadamard else x).t()


def _cast_totals(cast: _Cast, recipe: Recipe) -> Totals:
    values = cast.values.contiguous()
    scale = None
    if recipe.is_nvfp4:
        if cast.tensor_scale is not None:
            scale = torch.full((), cast.tensor_scale, dtype=torch.float32, device=values.device)
        else:
            scale = nvfp4.power_of_two_tensor_scale(largest(values.abs().amax(), cast.group))
    scales, tops = block_scales(values, recipe, scale, cast.tiles)
    return cast_totals(values, cast.operand.data, scales, tops)
