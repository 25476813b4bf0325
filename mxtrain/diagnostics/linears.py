"""The six casts and three GEMMs of a quantized linear, measured on a sample of its input and of its output gradient.

A cast to a block format has noise, saturation, underflow, and a range of block scales.

    fprop   Y  = X  W^T     casts "fprop_input", "fprop_weight"
    dgrad   dX = dY W       casts "dgrad_grad", "dgrad_weight"
    wgrad   dW = dY^T X     casts "wgrad_grad", "wgrad_input"

After an MXNorm, X stands for X diag(rho) and fprop's and dgrad's W for W diag(gain). Where wgrad's operands are
Hadamard-transformed before their cast, values and images are those after the transform.

The operands come from the functions that training calls (``ThreeGEMMs``). Modes "native" and "fp8_merged" are measured
through the images of mode "emulated", which hold the same values as "native". A cast that "fp8_merged" merges also has
the share of elements that merging changes. A dynamic tensor scale is that of the sample.

The ratio of a gradient's norm to its quantization noise is

    ||G|| / ||Q - G||        G the gradient of a weight in high precision, Q what wgrad's quantized operands give

With noise of standard deviation s in each of d elements, the denominator is s sqrt(d). Chmiel, Fishman, Banner, Soudry,
"FP4 All the Way: Fully Quantized Training of LLMs", arXiv 2505.19115, find that training stalls below sqrt(3).
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from mxtrain.diagnostics.totals import Totals, count, norm, ratio
from mxtrain.formats.collectives import largest
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import matmul
from mxtrain.formats.hadamard import along_tokens
from mxtrain.formats.hardware import MERGED, VALUE_MODES, operand_mode
from mxtrain.formats.matrices import Operand, at_least_fp32, tile_amax
from mxtrain.formats.mx.merged import changed_elements, shares_tile
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.formats.recipe import Recipe
from mxtrain.nn.gated_norm import normalize_groups
from mxtrain.nn.three_gemms import ThreeGEMMs


@dataclass(frozen=True, eq=False)
class MeasuredCast:
    """A cast of a matrix [R, C].

    Attributes:
        values: [R, C], fp32, before the cast.
        image: [R, C], the values that the cast's codes and scales stand for.
        recipe: of the cast.
        dim: the dimension along which blocks lie, 0 or 1: the axis that the GEMM reduces over.
        tiles: square tiles share a scale.
        tensor_scale: exact, or known before the cast; None if it comes from the values, or the format has none.
        by_row: each row has a tensor scale of its own.
        merges: mode "fp8_merged" merges the codes, with one scale per "tile" or "group" of 128; None otherwise.
        group: the name of the process group that holds the matrix together; None for a whole matrix.
    """

    values: torch.Tensor
    image: torch.Tensor
    recipe: Recipe
    dim: int
    tiles: bool = False
    tensor_scale: float | torch.Tensor | None = None
    by_row: bool = False
    merges: str | None = None
    group: str | None = None

    @cached_property
    def totals(self) -> Totals:
        values, recipe = self.values, self.recipe
        blocks = values.abs().unflatten(self.dim, (-1, recipe.block_size))
        amax, tensor_scale = blocks.amax(self.dim + 1), None
        amax = tile_amax(amax, recipe.block_size, 1 - self.dim) if self.tiles else amax
        if self.tensor_scale is not None:
            tensor_scale = torch.as_tensor(self.tensor_scale, dtype=amax.dtype, device=amax.device)
            tensor_scale = tensor_scale.unsqueeze(1) if tensor_scale.ndim else tensor_scale
        elif recipe.tensor_scaled:
            of_matrices = amax.amax(1, keepdim=True) if self.by_row else amax.amax()
            tensor_scale = recipe.ops.tensor_scales(largest(of_matrices, self.group))
        scales, tops = recipe.ops.block_scales(amax, recipe, tensor_scale)
        is_used = amax > 0  # a block of zeros has the smallest scale there is
        counts = {"nonzero": values != 0, "saturated": blocks > tops.unsqueeze(self.dim + 1)}
        counts["kept"] = counts["nonzero"] & (self.image != 0)
        merges = self.merges
        merged = {"merged": changed_elements(self.image, scales, self.dim, merges == "tile")} if merges else {}
        return Totals(
            {"elements": float(values.numel()), **{name: count(mask) for name, mask in counts.items()}, **merged},
            {"scale": torch.where(is_used, scales, math.inf).amin()},
            {"scale": torch.where(is_used, scales, -math.inf).amax()},
            {"signal": norm(values), "noise": norm(self.image - values)},
        )


def cast_figures(totals: Totals) -> dict[str, float]:
    """Return the figures of a cast by name. Exponents are those of the block scales of blocks that are not zero."""
    sums, least, largest, norms = totals
    figures = {} if "merged" not in sums else {"merged": ratio(sums["merged"], sums["kept"])}
    figures |= {
        "saturated": ratio(sums["saturated"], sums["elements"]),
        "underflowed": ratio(sums["nonzero"] - sums["kept"], sums["nonzero"]),
    }
    if norms["signal"] > 0 and norms["noise"] > 0:
        figures["sqnr_db"] = 20 * math.log10(norms["signal"] / norms["noise"])
    if math.isfinite(least["scale"]):
        extremes = {"scale_min_exponent": least["scale"], "scale_max_exponent": largest["scale"]}
        figures |= {name: float(math.frexp(scale)[1] - 1) for name, scale in extremes.items()}  # log2, rounded down
    return figures


@dataclass(frozen=True, eq=False)
class Input:
    """A sample of what linears get, R tokens.

    Attributes:
        x: [R, D]; the input of the norm if an MXNorm comes first.
        rho: inverse RMS estimates, fp32 [R], or [R, groups]; None without an MXNorm.
        gain: the norm's gain [D]; None without.
        estimate: the norm's estimate; None without an MXNorm.
        group: as in ``MeasuredCast``.
    """

    x: torch.Tensor
    rho: torch.Tensor | None = None
    gain: torch.Tensor | None = None
    estimate: RMSEstimate | None = None
    group: str | None = None

    @cached_property
    def values(self) -> torch.Tensor:
        """X [R, D], fp32, after the norm if there is one."""
        return at_least_fp32(self.x) if self.rho is None else scale_rows(self.x, self.rho)

    @property
    def groups(self) -> int:
        """How many groups of features the norm divides by an RMS of their own."""
        return self.rho.numel() // len(self.rho)

    def normalized(self, gemms: ThreeGEMMs) -> tuple[Operand, torch.Tensor]:
        """X after the norm as fprop's operand of these GEMMs, and rho [R, groups]."""
        return normalize_groups(self.x, self.groups, self.estimate, gemms.recipe.fprop, gemms.mode)


def linear_totals(gemms: ThreeGEMMs, *sample) -> dict[str, Totals]:
    """Measure a linear's GEMMs ("fprop") and casts ("fprop_input"), by name. GEMMs without a format are left out.

    Arguments as for ``linear_casts``.
    """
    mode = gemms.mode
    if mode not in VALUE_MODES:
        gemms = replace(gemms, mode="emulated")
    found = {}
    for gemm, casts in linear_casts(gemms, *sample).items():
        if mode == MERGED == operand_mode(getattr(gemms.recipe, gemm), mode):
            kinds = {name: "tile" if shares_tile(name, cast.dim) else "group" for name, cast in casts.items()}
            casts = {name: replace(cast, merges=kinds[name]) for name, cast in casts.items()}
        found[gemm] = product_totals(*casts.values())
        found |= {f"{gemm}_{name}": cast.totals for name, cast in casts.items() if cast.recipe.format}
    return found


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


def linear_casts(
    gemms: ThreeGEMMs,
    given: Input,
    weight: torch.Tensor,
    dy: torch.Tensor,
    signs: torch.Tensor | None,
    draws: torch.Tensor | None,
) -> dict[str, dict[str, MeasuredCast]]:
    """Return the two casts by name of each GEMM that rounds.

    Args:
        gemms: recipe, mode and split of the linear.
        weight: W [N, D], or this process's part.
        dy: the sample's output gradient [R, N].
        signs, draws: as for ``ThreeGEMMs.quantize_gradients``.
    """
    recipe, split = gemms.recipe, gemms.split
    fprop, dgrad, wgrad = (of_gemm.rounds for of_gemm in recipe.gemms)
    w = at_least_fp32(weight) if given.gain is None else at_least_fp32(weight) * given.gain
    x, grad = given.values, at_least_fp32(dy)

    def measured(values, group: str | None, operand: Operand, of_gemm: Recipe, dim: int, tiles=False) -> MeasuredCast:
        image = operand.values if dim == 1 else operand.values.t()
        return MeasuredCast(values, image, of_gemm, dim, tiles, operand.tensor_scale, group=group)

    weights = gemms.quantize_weights([weight], given.gain)
    dy_rows, dy_columns = gemms.quantize_gradients([dy], dgrad, wgrad, signs, [draws])
    found = {}
    if fprop:
        of_w = measured(w, split.w, weights[1], recipe.fprop, 1, recipe.fprop.weight_tiles)
        found["fprop"] = {"input": _input_along_features(gemms, given), "weight": of_w}
    if dgrad:
        of_w = measured(w, split.w, weights[0], recipe.dgrad, 0, recipe.dgrad.weight_tiles)
        found["dgrad"] = {"grad": measured(grad, split.dy, dy_rows, recipe.dgrad.of_gradients, 1), "weight": of_w}
    if wgrad:
        of = recipe.wgrad
        x_columns = gemms.quantize_along_tokens(given.x, given.rho, signs, estimate=given.estimate)
        if of.hadamard:
            x, grad = along_tokens(x, signs), along_tokens(grad, signs)
        found["wgrad"] = {
            "grad": measured(grad, split.dy, dy_columns, of.of_gradients, 0),
            "input": measured(x, given.group, x_columns, of, 0),
        }
    return found


def _input_along_features(gemms: ThreeGEMMs, given: Input) -> MeasuredCast:
    fprop, estimate = gemms.recipe.fprop, given.estimate
    if estimate is None:
        operand, scale = gemms.quantize_activation(given.x), None
    else:
        operand, _ = given.normalized(gemms)
        scale = fprop.ops.static_scale(given.x.shape[-1] // given.groups, estimate, fprop)
    scale = operand.tensor_scale if scale is None else scale
    by_row = fprop.tensor_scale == "row"
    return MeasuredCast(given.values, operand.values, fprop, 1, False, scale, by_row, group=given.group)


def product_totals(a: MeasuredCast, b: MeasuredCast) -> Totals:
    """Compare the product of the images of two casts with that of their matrices, both fp32."""
    exact = matmul(*(_reduced_last(cast.values, cast.dim) for cast in (a, b)), torch.float32)
    quantized = matmul(*(_reduced_last(cast.image, cast.dim) for cast in (a, b)), torch.float32)
    return Totals({}, {}, {}, {"signal": norm(exact), "noise": norm(quantized - exact)})


def _reduced_last(x: torch.Tensor, dim: int) -> torch.Tensor:
    return x if dim == 1 else x.t()
