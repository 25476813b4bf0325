"""Draw FOLDER/losses.csv as FOLDER/losses.png: the baseline's loss, and the others' paired differences to it.

python scripts/evidence/draw_losses.py scripts/evidence/llama3_1b bf16
python scripts/evidence/draw_losses.py scripts/evidence/norm_gradients exact
python scripts/evidence/draw_losses.py scripts/evidence/rms_ablations exact --gradient-norms
"""

import argparse
import math
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from mxtrain.analysis.comparison_figures import FONT_SIZE, SMALL, WIDTH, limits, scale
from mxtrain.analysis.plots import in_own_style, moving_average, save_picture


def read(path: Path) -> pd.DataFrame:
    """Return ``variant``, ``seed``, ``step``, ``loss`` and ``grad_norm``.

    A run that was started again ("p2 before") is left out.
    """
    rows = pd.read_csv(path)
    if "run" in rows:
        rows[["variant", "seed"]] = rows.run.str.split(" seed ", expand=True).fillna("0").astype({1: int})
    return rows[~rows.variant.str.endswith(" before")]


def draw_curves(figure, rows: pd.DataFrame, baseline: str, title: str) -> None:
    """Draw the baseline's loss, and in a panel per other variant the differences to it by seed."""
    losses = rows.pivot(index="step", columns=["variant", "seed"], values="loss")
    points = 2 * (len(losses) // 50) + 1  # about 4 % of a curve
    curves = {baseline: losses[baseline]}
    for name in rows.variant.unique():
        if name != baseline:
            curves[name] = (losses[name] - losses[baseline]).dropna(axis=1, how="all")
    curves = {name: own.apply(lambda one: moving_average(one, 2 * (points // 2) + 1)) for name, own in curves.items()}
    ends = {name: np.nanquantile(own, (0.01, 0.99)) for name, own in curves.items() if name != baseline}
    reach = scale(np.abs(own).max() for own in ends.values())
    columns = math.isqrt(len(curves) - 1) + 1
    panels = figure.subplots(math.ceil(len(curves) / columns), columns, squeeze=False).flatten()
    for axes, (name, own) in zip(panels, curves.items()):
        color = "black" if name == baseline else sns.color_palette("colorblind")[0]
        axes.plot(own, color=color, alpha=0.35, linewidth=0.7)
        band = own.min(axis=1, skipna=False), own.max(axis=1, skipna=False)
        axes.fill_between(own.index, *band, color=color, alpha=0.2, linewidth=0)
        axes.plot(own.mean(axis=1, skipna=False), color=color, linewidth=1.6)
        axes.set_title(name, fontsize=FONT_SIZE)
        axes.set(xlabel="step", ylabel=f"{'loss' if name == baseline else 'difference'} (nats per token)")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(0, losses.index.max())
        axes.grid(alpha=0.25)
        if name != baseline:
            axes.axhline(0, color="black", linewidth=1)
            axes.set_ylim(limits(ends.values(), reach, margin=0.15))
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(f"Training loss of {baseline}, and paired differences to it: {title}", fontsize=11)
    note = "Lines: mean over seeds, where all of them are. Bands: from the lowest to the highest seed."
    figure.supxlabel(f"{note}\nAll are means of {points} logged steps.", fontsize=SMALL, color="0.3")


@in_own_style
def draw(folder: Path, baseline: str, gradient_norms: bool = False) -> None:
    rows = read(folder / "losses.csv")
    count = rows.variant.nunique()
    height = 2.6 * math.ceil(count / (math.isqrt(count - 1) + 1)) + 1.3
    figure = Figure(figsize=(WIDTH, height + 3.6 * gradient_norms), dpi=120, layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=(height, 3.6)) if gradient_norms else [figure]
    draw_curves(parts[0], rows, baseline, folder.resolve().name)
    if gradient_norms:
        axes, names = parts[1].subplots(), rows.variant + ", seed " + rows.seed.astype(str)
        sns.lineplot(rows, x="step", y="grad_norm", hue=names, style=names, palette="colorblind", ax=axes)
        axes.set(yscale="log", ylabel="gradient norm, every run", xlim=(100, None), ylim=(0.1, None))
        axes.legend(frameon=False, fontsize=SMALL, handlelength=4, ncols=2)
        axes.grid(alpha=0.25)
    save_picture(figure, folder / "losses.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("baseline")
    parser.add_argument("--gradient-norms", action="store_true")
    args = parser.parse_args()
    draw(args.folder, args.baseline, args.gradient_norms)
