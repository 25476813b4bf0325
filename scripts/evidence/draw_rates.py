"""Draw the losses of FILE.csv, and their paired differences, against the learning rate, as FILE/learning_rates.svg.

python scripts/evidence/draw_rates.py scripts/evidence/llama3_125m.csv "mx_linear mxfp8"
python scripts/evidence/draw_rates.py scripts/evidence/qwen3_126m.csv "bf16, decompose_k_router"
"""

import sys
import textwrap
from itertools import cycle, islice
from pathlib import Path

import seaborn as sns
from matplotlib.figure import Figure

from mxtrain.analysis.comparison import Group, compare, read_results
from mxtrain.analysis.plots import COLORS, WIDTH, in_own_style, rendered

LINEAR_BELOW = 0.01
"""Nats. The axis of differences is linear up to here, and logarithmic beyond"""
MARKERS = "osD^vPX<>phd"


@in_own_style
def rates_svg(group: Group) -> str:
    """Draw validation losses; empty with fewer than two rates."""
    rates, variants = sorted(group.cells.lr.unique()), list(group.cells.variant.unique())
    if len(rates) < 2:
        return ""
    base = group.cells[group.cells.variant == group.baseline].set_index("lr").validation
    points = group.cells[["lr", "variant"]].assign(
        # Means over different seeds differ by what the seeds do. Their pairs do not.
        loss=[
            base[cell.lr].mean + cell.validation_difference.mean if cell.validation_difference else cell.validation.mean
            for cell in group.cells.itertuples()
        ]
    )
    # Side by side, so that no bar hides another: together a fifth of the distance between rates.
    apart = min(b / a for a, b in zip(rates, rates[1:])) ** 0.2
    places = {name: apart ** ((i + 0.5) / len(variants) - 0.5) for i, name in enumerate(variants)}
    style = {
        "hue": "variant", "hue_order": variants, "palette": [*islice(cycle(COLORS), len(variants))],
        "style": "variant", "style_order": variants, "markers": [*MARKERS[: len(variants)]], "markersize": 6,
    }  # fmt: skip
    figure = Figure((WIDTH, 6.5 + 0.18 * len(variants)))
    upper, lower = figure.subplots(2, 1, sharex=True)
    sns.lineplot(points, x=points.lr * points.variant.map(places), y="loss", ax=upper, **style)
    pairs = group.results.dropna(subset="validation_difference")
    sns.lineplot(
        pairs, x=pairs.lr * pairs.variant.astype(str).map(places), y="validation_difference", ax=lower, legend=False,
        errorbar="se", err_style="bars", err_kws={"capsize": 3, "elinewidth": 1.2}, **style,
    )  # fmt: skip
    lower.axhline(0, color="black", linewidth=1)
    lower.set(xscale="log", xlabel="learning rate", ylabel=f"nats per token\n(logarithmic beyond ±{LINEAR_BELOW:g})")
    lower.set_yscale("symlog", linthresh=LINEAR_BELOW)
    lower.yaxis.set_major_formatter(lambda value, _: f"{value:+g}" if value else "0")
    lower.set_xticks(rates, [f"{rate:g}" for rate in rates])
    lower.minorticks_off()
    upper.set_ylabel("nats per token")
    upper.get_legend().remove()
    figure.legend(*upper.get_legend_handles_labels(), loc="outside lower center", handlelength=4)
    for axes in (upper, lower):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"Validation loss against the learning rate:\n{textwrap.fill(group.title, 66)}")
    upper.set_title(f"mean of {group.baseline}, plus mean paired differences")
    lower.set_title("these differences, and their standard errors")
    return rendered(figure, "svg").decode()


if __name__ == "__main__":
    table, baseline = Path(sys.argv[1]), sys.argv[2]
    groups = compare(read_results(table), baseline)
    for number, group in enumerate(groups, start=1):
        if svg := rates_svg(group):
            name = f"learning_rates{f'_{number}' * (len(groups) > 1)}.svg"
            (table.with_suffix("") / name).write_text(svg)
