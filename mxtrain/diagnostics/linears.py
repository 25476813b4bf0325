"""The six casts and three GEMMs of a quantized linear, measured on a sample of its input and of its output gradient.

    fprop   Y  = X  W^T     casts "fprop_input", "fprop_weight"
    dgrad   dX = dY W       casts "dgrad_grad", "dgrad_weight"
    wgrad   dW = dY^T X     casts "wgrad_grad", "wgrad_input"

After an MXNorm, X stands for X diag(rho) and fprop's and dgrad's W for W diag(gain). Where wgrad's operands are
Hadamard-transformed before their cast, values and images are those after the transform.

The operands come from the functions that training calls (``mxtrain.ops.quantize``). Mode "native" is measured through
the images of mode "emulated", which hold the same values. A dynamic tensor scale of NVFP4 is that of the sample.
"""

from collections import defaultdict
from dataclasses import dataclass, replace

import torch

from mxtrain.diagnostics.casts import Cast, Matrix, cast_figures, cast_totals
from mxtrain.diagnostics.products import norm_to_noise, product_totals, relative_error
from mxtrain.diagnostics.totals import Totals
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.ops import quantize
from mxtrain.ops.gemm import Operand
from mxtrain.ops.mxnorm import normalize
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


def linear_totals(gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, dy: torch.Tensor) -> dict[str, Totals]:
    """Measure a linear's casts and GEMMs; by name. GEMMs without a format are left out.

    Args:
        gemms: recipe, mode and split of the linear.
        weight: W [N, D], or this process's part.
        dy: the output gradient of the sample, [R, N].
    """
    if gemms.mode == "native":
        gemms = replace(gemms, mode="emulated")
    found, by_format = {}, defaultdict(dict)
    for gemm, casts in _casts(gemms, given, weight, dy).items():
        recipe = getattr(gemms.recipe, gemm)
        found[gemm] = _product_totals(*casts.values())
        by_format[recipe.format, recipe.scale_rounding] |= {f"{gemm}_{name}": cast for name, cast in casts.items()}
    for (fmt, scale_rounding), casts in by_format.items():
        found |= cast_totals(casts, fmt, scale_rounding)
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


def _casts(gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, dy: torch.Tensor) -> dict[str, dict[str, Cast]]:
    """For each GEMM with a format: its two casts by name."""
    recipe, mode, split = gemms.recipe, gemms.mode, gemms.split
    fprop, dgrad, wgrad = (of_gemm.format is not None for of_gemm in recipe.gemms)
    x_values = at_least_fp32(given.x) if given.rho is None else scale_rows(given.x, given.rho)
    w_values = at_least_fp32(weight) if given.gain is None else at_least_fp32(weight) * given.gain
    x, w, grad = Matrix(x_values, split.x), Matrix(w_values, split.w), Matrix(at_least_fp32(dy), split.dy)
    w_rows, w_columns = quantize.weight_for_both(weight, recipe, mode, given.gain, split.w)
    dy_rows, dy_columns = quantize.gradient(dy, recipe, mode, dgrad, wgrad, given.signs, given.draws, split.dy)
    found = {}
    if fprop:
        of_w = Cast(w, w_rows.data, 1, recipe.fprop.weight_tiles)
        found["fprop"] = {"input": _input(gemms, given, x), "weight": of_w}
    if dgrad:
        of_w = Cast(w, w_columns.data.t(), 0, recipe.dgrad.weight_tiles)
        found["dgrad"] = {"grad": Cast(grad, dy_rows.data, 1), "weight": of_w}
    if wgrad:
        x_columns = quantize.activation_along_tokens(given.x, recipe.wgrad, mode, given.rho, given.signs, split.x)
        if recipe.wgrad.hadamard:
            grad, x = _transformed(grad, x, given.signs)
        found["wgrad"] = {"grad": Cast(grad, dy_columns.data.t(), 0), "input": Cast(x, x_columns.data.t(), 0)}
    return found


def _input(gemms: ThreeGEMMs, given: Input, x: Matrix) -> Cast:
    """The cast of fprop's input; ``x`` are its values."""
    fprop, estimate = gemms.recipe.fprop, given.estimate
    if estimate is None:
        return Cast(x, quantize.activation(given.x, fprop, gemms.mode, gemms.split.x).data, 1)
    static = None
    if fprop.tensor_scale == "static":
        columns = x.values.shape[-1]
        static = nvfp4.static_tensor_scale(columns, estimate.p, estimate.estimator, estimate.constant)
    return Cast(x, normalize(given.x, estimate, fprop, gemms.mode)[0].data, 1, tensor_scale=static)


def _transformed(a: Matrix, b: Matrix, signs: torch.Tensor) -> tuple[Matrix, Matrix]:
    """The Hadamard transforms of two matrices along tokens, from one calculation."""
    both = hadamard(pad(torch.cat((a.values, b.values), 1), 0), unpack_signs(signs), 0)
    of_a, of_b = both.split((a.values.shape[1], b.values.shape[1]), 1)
    return Matrix(of_a, a.group), Matrix(of_b, b.group)


def _product_totals(a: Cast, b: Cast) -> Totals:
    return product_totals(
        *(_reduced_last(cast.matrix.values, cast.dim) for cast in (a, b)),
        *(Operand(_reduced_last(cast.image, cast.dim)) for cast in (a, b)),
    )


def _reduced_last(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if dim == 1 else x.t()
