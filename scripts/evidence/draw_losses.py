"""Draw FOLDER/losses.csv as FOLDER/losses.png: the baseline's loss, and the others' paired differences to it.

python scripts/evidence/draw_losses.py scripts/evidence/llama3_1b bf16
python scripts/evidence/draw_losses.py scripts/evidence/norm_gradients exact
python scripts/evidence/draw_losses.py scripts/evidence/rms_ablations exact --gradient-norms
"""

import argparse
import csv
import math
from pathlib import Path

import numpy as np

from mxtrain.analysis.plots import Curve, in_own_style, line_style, save_picture
from mxtrain.analysis.report_figures import WIDTH, columns_of, draw_curves

NONE = np.array([])


def read(path: Path, column: str) -> dict[str, dict[str, Curve]]:
    """Return variant -> seed -> curve of a column. A run that was started again ("p2 before") is left out."""
    rows: dict[str, dict[str, list[tuple[float, float]]]] = {}
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            name, _, seed = row["run"].partition(" seed ") if "run" in row else (row["variant"], "", row["seed"])
            if not name.endswith(" before"):
                seeds = rows.setdefault(name, {})
                seeds.setdefault(seed or "0", []).append((float(row["step"]), float(row[column])))
    return {n: {s: Curve(*np.array(own).T, NONE, NONE) for s, own in seeds.items()} for n, seeds in rows.items()}


@in_own_style
def draw(folder: Path, baseline: str, gradient_norms: bool = False) -> None:
    from matplotlib.figure import Figure

    losses = read(folder / "losses.csv", "loss")
    height = 2.6 * math.ceil(len(losses) / columns_of(len(losses))) + 1.3
    figure = Figure(figsize=(WIDTH, height + 3.6 * gradient_norms), dpi=120, layout="constrained")
    parts = figure.subfigures(2, 1, height_ratios=(height, 3.6)) if gradient_norms else [figure]
    draw_curves(parts[0], losses, baseline, folder.resolve().name)
    if gradient_norms:
        axes = parts[1].subplots()
        norms = read(folder / "losses.csv", "grad_norm")
        own = {f"{name}, seed {seed}": one for name, seeds in norms.items() for seed, one in seeds.items()}
        for index, (name, one) in enumerate(own.items()):
            axes.plot(one.x, one.loss, **line_style(index), label=name)
        axes.set(yscale="log", xlabel="step", ylabel="gradient norm, every run", xlim=(100, None), ylim=(0.1, None))
        axes.legend(frameon=False, fontsize=9, handlelength=4, ncols=2)
        axes.grid(alpha=0.25)
    save_picture(figure, folder / "losses.png")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("baseline")
    parser.add_argument("--gradient-norms", action="store_true")
    args = parser.parse_args()
    draw(args.folder, args.baseline, args.gradient_norms)
