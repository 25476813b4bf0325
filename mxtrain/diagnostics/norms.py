"""How good the RMS estimate of an MXNorm is, row by row, and how large the norm's output is.

Ratio and r^2 compare the estimate r_t of token t with the true RMS. r^2 is the square of Pearson's correlation of both
over the rows: the share of the variance of the true RMS that the estimate explains. Rows of zeros and rows that are not
finite are left out.

The output x_t rho_t has a bound that is known before training (``mxtrain.static_tensor_scale`` derives it). Outputs
near the bound mean that the largest element dominates its row.
"""

import math

import torch

from mxtrain.diagnostics.totals import Totals, ratio
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mxnorm import inverse_root, mean_square
from mxtrain.formats.recipe import Recipe

OUTLIER = 10.0
"""
A row has an outlier if an element exceeds 10 times the row's true RMS. No row of fewer than 100 elements can, and of
Gaussian rows of 65,536 elements one in 10^18 does
"""


def output_bound(columns: int, estimate: RMSEstimate, recipe: Recipe) -> float:
    """Return the bound of |x rho| for rows of ``columns`` elements.

    With the exact RMS it is sqrt(D), otherwise c K^(1/p) for K blocks. "post_round" with FLOOR reads maxima that are
    rounded down by a factor of less than 2, which doubles the bound.
    """
    if estimate.estimator == "exact":
        return math.sqrt(columns)
    rounded_down = estimate.estimator == "post_round" and recipe.scale_rounding == "floor"
    bound = estimate.constant * (columns / estimate.block_size) ** (1 / estimate.p)
    return 2 * bound if rounded_down else bound


def norm_totals(x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe) -> Totals:
    """Measure the estimate on the rows of ``x`` [T, D], bf16 or fp32, before the norm."""
    squared = mean_square(x, estimate, recipe)
    estimated = squared.sqrt()
    true = x.double().square().mean(-1).sqrt()
    amax = x.abs().amax(-1).double()
    counts = (true > 0) & (true < math.inf) & (estimated < math.inf)
    ratios = torch.where(counts, estimated / true, 0.0)
    e, t = (torch.where(counts, values, 0.0) for values in (estimated, true))
    sums = {"rows": counts, "ratio": ratios, "ratio^2": ratios.square(), "outliers": amax > OUTLIER * true}
    sums |= {"e": e, "t": t, "ee": e * e, "tt": t * t, "et": e * t}
    output = torch.where(counts, amax * inverse_root(squared, estimate).float(), 0.0)
    return Totals(
        dict(zip(sums, torch.stack([values.double() for values in sums.values()]).sum(-1))),
        {"ratio": torch.where(counts, ratios, math.inf).amin()},
        {"ratio": ratios.amax(), "output": output.amax(), "bound": output_bound(x.shape[-1], estimate, recipe)},
    )


def norm_figures(totals: Totals) -> dict[str, float]:
    """Return the figures of a norm by name; none for a sample without a row that counts."""
    sums, least, largest, _ = totals
    rows = sums["rows"]
    if rows == 0:
        return {}
    mean = sums["ratio"] / rows
    figures = {
        "rms_ratio_mean": mean,
        "rms_ratio_std": math.sqrt(max(0.0, sums["ratio^2"] / rows - mean * mean)),
        "rms_ratio_min": least["ratio"],
        "rms_ratio_max": largest["ratio"],
        "output_max": largest["output"],
        "output_max_over_bound": largest["output"] / largest["bound"],
        "outlier_rows": ratio(sums["outliers"], rows),
    }
    if (r2 := squared_correlation(rows, sums["e"], sums["t"], sums["ee"], sums["tt"], sums["et"])) is not None:
        figures["rms_r2"] = r2
    return figures


def squared_correlation(n: float, x: float, y: float, xx: float, yy: float, xy: float) -> float | None:
    """Return Pearson's correlation squared, from the number of pairs and the sums of x, y, x^2, y^2 and x y.

    None if x or y does not vary by more than the rounding errors of the sums.
    """
    variance_x, variance_y, covariance = xx / n - (x / n) ** 2, yy / n - (y / n) ** 2, xy / n - x * y / n**2
    noise = 1e-12
    if variance_x <= noise * xx / n or variance_y <= noise * yy / n:
        return None
    return min(1.0, covariance**2 / (variance_x * variance_y))
