"""Draw FOLDER/losses.csv as FOLDER/losses.png: the baseline's loss, and the others' paired differences to it.

python scripts/evidence/draw_losses.py scripts/evidence/llama3_1b bf16
python scripts/evidence/draw_losses.py scripts/evidence/norm_gradients exact
python scripts/evidence/draw_losses.py scripts/evidence/rms_ablations exact --gradient-norms
"""

import argparse
import math
from itertools import cycle, islice
from pathlib import Path

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from mxtrain.analysis.comparison_figures import limits, scale
from mxtrain.analysis.plots import COLORS, WIDTH, in_own_style, moving_average, save_picture, window

COLUMNS = 2


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
    points = window(losses, None)
    curves = {baseline: losses[baseline]}
    for name in rows.variant.unique():
        if name != baseline:
            curves[name] = (losses[name] - losses[baseline]).dropna(axis=1, how="all")
    curves = {name: own.apply(lambda one: moving_average(one, points)) for name, own in curves.items()}
    ends = {name: np.nanquantile(own, (0.01, 0.99)) for name, own in curves.items() if name != baseline}
    reach = scale(np.abs(own).max() for own in ends.values())
    panels = figure.subplots(math.ceil(len(curves) / COLUMNS), COLUMNS, squeeze=False).flatten()
    for axes, (name, own) in zip(panels, curves.items()):
        color = "black" if name == baseline else COLORS[0]
        axes.plot(own, color=color, alpha=0.35, linewidth=0.7)
        band = own.min(axis=1, skipna=False), own.max(axis=1, skipna=False)
        axes.fill_between(own.index, *band, color=color, alpha=0.2, linewidth=0)
        axes.plot(own.mean(axis=1, skipna=False), color=color, linewidth=1.6)
        axes.set_title(f"loss of {name}" if name == baseline else f"{name} minus {baseline}")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.set_xlim(0, losses.index.max())
        axes.grid(alpha=0.25)
        if name != baseline:
            axes.axhline(0, color="black", linewidth=1)
            axes.set_ylim(limits(ends.values(), reach, margin=0.15))
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    figure.suptitle(f"{title}: training loss")
    figure.supylabel("nats per token")
    note = "Lines: mean over seeds, where all of them are.\nBands: from the lowest to the highest seed."
    figure.supxlabel(f"step\n{note}\nAll are means of {points} logged steps.")


@in_own_style
def draw(folder: Path, baseline: str, gradient_norms: bool = False) -> None:
    rows = read(folder / "losses.csv")
    count = rows.variant.nunique()
    height = 1.7 * math.ceil(count / COLUMNS) + 1.1
    figure = Figure((WIDTH, height + 3.4 * gradient_norms))
    parts = figure.subfigures(2, 1, height_ratios=(height, 3.4)) if gradient_norms else [figure]
    draw_curves(parts[0], rows, baseline, folder.resolve().name)
    if gradient_norms:
        axes, names = parts[1].subplots(), rows.variant + ", seed " + rows.seed.astype(str)
        palette = [*islice(cycle(COLORS), names.nunique())]
        sns.lineplot(rows, x="step", y="grad_norm", hue=names, style=names, palette=palette, ax=axes)
        axes.set(yscale="log", ylabel="gradient norm, every run", xlim=(100, None), ylim=(0.1, None))
        axes.get_legend().remove()
        parts[1].legend(*axes.get_legend_handles_labels(), loc="outside lower center", handlelength=4, ncols=2)
        axes.grid(alpha=0.25)
    save_picture(figure, folder / "losses.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("baseline")
    parser.add_argument("--gradient-norms", action="store_true")
    args = parser.parse_args()
    draw(args.folder, args.baseline, args.gradient_norms)
