"""The six casts and three GEMMs of a quantized linear, measured on a sample of its input and of its output gradient.

    fprop   Y  = X  W^T     casts "fprop_input", "fprop_weight"
    dgrad   dX = dY W       casts "dgrad_grad", "dgrad_weight"
    wgrad   dW = dY^T X     casts "wgrad_grad", "wgrad_input"

After an MXNorm, X stands for X diag(rho) and fprop's and dgrad's W for W diag(gain). Where wgrad's operands are
Hadamard-transformed before their cast, values and images are those after the transform.

Linears with the same input (wq, wk, wv; w1, w3) share its sample. The first one measures the casts of the input. The
others take its figures and operands where they have the same recipe and signs.

The operands come from the functions that training calls (``ThreeGEMMs``). Mode "native" is measured through
the images of mode "emulated", which hold the same values. A dynamic tensor scale is that of the sample.

The ratio of a gradient's norm to its quantization noise is

    ||G|| / ||Q - G||        G the gradient of a weight in high precision, Q what wgrad's quantized operands give

With noise of standard deviation s in each of d elements, the denominator is s sqrt(d). Chmiel, Fishman, Banner, Soudry,
"FP4 All the Way: Fully Quantized Training of LLMs", arXiv 2505.19115, find that training stalls below sqrt(3).
"""

from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from mxtrain.diagnostics.casts import Matrix, MeasuredCast, cast_figures
from mxtrain.diagnostics.totals import Totals, norms, ratio
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import matmul
from mxtrain.formats.hadamard import hadamard, pad, unpack_signs
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.launch.pytorch import sub_of_each
from mxtrain.nn.three_gemms import ThreeGEMMs


@dataclass(frozen=True, eq=False)
class Input:
    """A sample of what linears get, R tokens.

    Attributes:
        x: [R, D]; the input of the norm if an MXNorm comes first.
        rho: inverse RMS estimates, fp32 [R]; None without an MXNorm.
        gain: the norm's gain [D]; None without.
        estimate: the norm's estimate; None without an MXNorm.
        group: as in ``Matrix``.
        casts: those made so far, by GEMM, recipe, mode and signs.
    """

    x: torch.Tensor
    rho: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    estimate: RMSEstimate | None = None
    group: str | None = None
    casts: dict[tuple, MeasuredCast] = field(default_factory=dict)

    @cached_property
    def matrix(self) -> Matrix:
        """X [R, D], after the norm if there is one."""
        values = at_least_fp32(self.x) if self.rho is None else scale_rows(self.x, self.rho)
        return Matrix(values, self.group)


@dataclass(frozen=True, eq=False)
class Gradient:
    """The output gradient of a linear for a sample.

    Attributes:
        dy: [R, N].
        signs: of the Hadamard transform, int64 []; None without.
        draws: of stochastic rounding, int64 [4]; None without.
    """

    dy: torch.Tensor
    signs: torch.Tensor | None = None
    draws: torch.Tensor | None = None


def products_and_casts(
    gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, gradient: Gradient
) -> tuple[dict[str, Totals], dict[str, MeasuredCast]]:
    """Measure a linear's GEMMs, and make its casts for ``cast_totals``; by name. GEMMs without a format are left out.

    Args:
        gemms: recipe, mode and split of the linear.
        weight: W [N, D], or this process's part.
    """
    if gemms.mode == "native":
        gemms = replace(gemms, mode="emulated")
    by_gemm = _casts(gemms, given, weight, gradient)
    if not by_gemm:
        return {}, {}
    found = product_totals({gemm: tuple(casts.values()) for gemm, casts in by_gemm.items()})
    casts = {f"{gemm}_{name}": cast for gemm, of_gemm in by_gemm.items() for name, cast in of_gemm.items()}
    fprop, dgrad, _ = gemms.recipe.gemms
    if fprop.weight_tiles and fprop == dgrad:
        # A tile is the same block along either axis: one measurement serves both names.
        casts["dgrad_weight"] = casts["fprop_weight"]
    return found, casts


def linear_figures(found: dict[str, Totals]) -> dict[str, float]:
    """Return the figures of a linear by name, such as "fprop_input_sqnr_db", "fprop_error", "grad_norm_to_noise"."""
    figures = {}
    for name, totals in found.items():
        if "_" in name:
            figures |= {f"{name}_{figure}": value for figure, value in cast_figures(totals).items()}
        else:
            figures[f"{name}_error"] = ratio(totals.norms["noise"], totals.norms["signal"])
    if "wgrad" in found:
        figures["grad_norm_to_noise"] = norm_to_noise(found["wgrad"])
    return figures


def norm_to_noise(totals: Totals) -> float:
    """Return the norm of a product in high precision over the norm of its difference to the quantized one."""
    return ratio(totals.norms["signal"], totals.norms["noise"])


def _casts(
    gemms: ThreeGEMMs, given: Input, weight: torch.Tensor, gradient: Gradient
) -> dict[str, dict[str, MeasuredCast]]:
    """For each GEMM with a format: its two casts by name."""
    recipe, split = gemms.recipe, gemms.split
    dy, signs, draws = gradient.dy, gradient.signs, gradient.draws
    fprop, dgrad, wgrad = (of_gemm.format is not None for of_gemm in recipe.gemms)
    # Never the weight itself: casts are measured later, and FSDP2 frees the memory of the gathered one.
    w_values = weight.to(torch.float32, copy=True) if given.gain is None else at_least_fp32(weight) * given.gain
    w, grad = Matrix(w_values, split.w), Matrix(at_least_fp32(dy), split.dy)
    weights = gemms.quantize_weights([weight], given.gain)
    dy_rows, dy_columns = gemms.quantize_gradients([dy], dgrad, wgrad, signs, [draws])
    found = {}
    if fprop:
        of_w = MeasuredCast(w, weights[1].data, recipe.fprop, 1, recipe.fprop.weight_tiles)
        found["fprop"] = {"input": _input_along_features(gemms, given), "weight": of_w}
    if dgrad:
        of_w = MeasuredCast(w, weights[0].data.t(), recipe.dgrad, 0, recipe.dgrad.weight_tiles)
        found["dgrad"] = {"grad": MeasuredCast(grad, dy_rows.data, recipe.dgrad, 1), "weight": of_w}
    if wgrad:
        grad, of_x = _along_tokens(gemms, given, grad, signs)
        found["wgrad"] = {"grad": MeasuredCast(grad, dy_columns.data.t(), recipe.wgrad, 0), "input": of_x}
    return found


def _input_along_features(gemms: ThreeGEMMs, given: Input) -> MeasuredCast:
    """The cast of fprop's input."""
    fprop, mode, estimate = gemms.recipe.fprop, gemms.mode, given.estimate
    key = ("fprop", fprop, mode)
    if key not in given.casts:
        static = None
        if estimate is None:
            operand = gemms.quantize_activation(given.x)
        else:
            operand = fprop.ops.normalize(given.x, estimate, fprop, mode)[0]
            static = fprop.ops.static_scale(given.x.shape[-1], estimate, fprop)
        given.casts[key] = MeasuredCast(given.matrix, operand.data, fprop, 1, tensor_scale=static)
    return given.casts[key]


def _along_tokens(
    gemms: ThreeGEMMs, given: Input, grad: Matrix, signs: torch.Tensor | None
) -> tuple[Matrix, MeasuredCast]:
    """The output gradient as wgrad casts it, and the cast of wgrad's input."""
    wgrad, mode = gemms.recipe.wgrad, gemms.mode
    key = ("wgrad", wgrad, mode, signs)
    is_new = key not in given.casts
    matrices = [grad, given.matrix] if is_new else [grad]
    if wgrad.hadamard:
        matrices = _transformed(matrices, signs)
    if is_new:
        operand = gemms.quantize_along_tokens(given.x, given.rho, signs)
        given.casts[key] = MeasuredCast(matrices[1], operand.data.t(), wgrad, 0)
    return matrices[0], given.casts[key]


def _transformed(matrices: list[Matrix], signs: torch.Tensor) -> list[Matrix]:
    """The Hadamard transforms of matrices along tokens, from one calculation."""
    joined = torch.cat([matrix.values for matrix in matrices], 1)
    parts = hadamard(pad(joined, 0), unpack_signs(signs), 0).split([m.values.shape[1] for m in matrices], 1)
    # A single tensor with gaps between its rows would make ``norms`` of all tensors slow.
    return [Matrix(values.contiguous(), matrix.group) for values, matrix in zip(parts, matrices)]


def product_totals(gemms: dict[str, tuple[MeasuredCast, MeasuredCast]]) -> dict[str, Totals]:
    """Compare the product of the images of two casts with that of their matrices, both fp32; by name of the GEMM."""
    exact, quantized = [], []
    for casts in gemms.values():
        values = (_reduced_last(cast.matrix.values, cast.dim) for cast in casts)
        images = (_reduced_last(cast.image, cast.dim) for cast in casts)
        exact.append(matmul(*values, torch.float32))
        quantized.append(matmul(*images, torch.float32))
    measured = norms([*exact, *sub_of_each(quantized, exact)])
    return {
        gemm: Totals({}, {}, {}, {"signal": signal, "noise": noise})
        for gemm, signal, noise in zip(gemms, measured, measured[len(gemms) :])
    }


def _reduced_last(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if dim == 1 else x.t()
