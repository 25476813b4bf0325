"""The errors of a rehearsal (``mxtrain.diagnostics.rehearsal``): table, heat map, and the recipes that meet a bound."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from mxtrain.analysis.numerics import ROW, SMALLEST, WORST, module_order
from mxtrain.analysis.plots import WIDTH, in_own_style, literal, save_picture
from mxtrain.analysis.tables import aligned
from mxtrain.config import dump_config
from mxtrain.formats.recipe import GEMMS, HIGH_PRECISION_RECIPE

if TYPE_CHECKING:
    import pandas as pd


def table_of(errors: Mapping[tuple[str, str], Iterable[float]]) -> "pd.DataFrame":
    """Return layer, recipe -> the errors of fprop, dgrad and wgrad and their maximum, "error", in the model's order."""
    import pandas as pd

    found = dict(sorted(errors.items(), key=lambda item: module_order(item[0][0])))
    table = pd.DataFrame(found.values(), pd.MultiIndex.from_tuples(found, names=("layer", "recipe")), GEMMS)
    table["error"] = table.max(axis=1, skipna=False)  # NaN, of products that are not finite, meets no bound
    return table


def by_recipe(errors: "pd.DataFrame") -> "pd.DataFrame":
    """Return the errors of ``table_of`` as layers by recipes."""
    index = errors.index
    return errors["error"].unstack("recipe").reindex(index.unique("layer"), columns=index.unique("recipe"))


def worst_layers(errors: "pd.DataFrame") -> "pd.Series":
    """Return the layers that stand out most, with the largest ratio of their errors to a recipe's median error."""
    found = by_recipe(errors)
    return (found / found.median()).max(axis=1).nlargest(WORST)


def report(errors: "pd.DataFrame", costs: Mapping[str, float], bound: float) -> str:
    """Return a line per recipe: its cost, mean errors, worst layer, and how many layers meet the bound."""
    rows = [("recipe", "worst layer", "error", *GEMMS, "cost", f"within {bound:g}")]
    for name, own in errors.groupby("recipe", sort=False):
        own = own.droplevel("recipe")
        worst = own["error"].fillna(math.inf).idxmax()
        means = (f"{own[gemm].mean():.4f}" for gemm in GEMMS)
        within = f"{(own['error'] <= bound).sum()} of {len(own)}"
        rows.append((name, worst, f"{own['error'][worst]:.4f}", *means, f"{costs[name]:.2f}", within))
    outstanding = ", ".join(f"{layer} ({times:.2f})" for layer, times in worst_layers(errors).items())
    return f"{aligned(rows)}\nlargest errors over the recipe's median: {outstanding}"


def recipes_within(
    errors: "pd.DataFrame", costs: Mapping[str, float], bound: float, together: Iterable[Iterable[str]]
) -> dict[str, str]:
    """Return layer -> the cheapest recipe whose three errors are at most ``bound``, else high precision.

    The layers in each group of ``together`` have one recipe, which the largest of their errors decides.
    """
    found, chosen = by_recipe(errors), {}
    groups = {layer: [layer] for layer in found.index} | {layer: [*group] for group in together for layer in group}
    for layer, group in groups.items():
        within = (name for name in sorted(costs, key=costs.get) if (found.loc[group, name] <= bound).all())
        chosen[layer] = next(within, HIGH_PRECISION_RECIPE)
    return chosen


def write_toml(recipes: Mapping[str, str], path: Path) -> None:
    """Write a table [mxnorm] that gives every layer its recipe. Raises OSError."""
    default, _ = Counter(recipes.values()).most_common(1)[0]
    others = {layer: recipe for layer, recipe in recipes.items() if recipe != default}
    dump_config({"mxnorm": {"recipe": default, "high_precision_share": 0.0, "recipes": others}}, path)


@in_own_style
def draw(errors: "pd.DataFrame", title: str, path: Path) -> None:
    """Draw errors as a heat map, layers by recipes, with the names of the worst layers."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    found, worst = by_recipe(errors), worst_layers(errors).index
    picture = Figure((WIDTH, 3 + max(2.0, ROW * len(found))))
    axes = picture.subplots()
    axes.set_facecolor("0.8")  # of products that are not finite
    image = axes.imshow(found, cmap="viridis_r", aspect="auto", interpolation="none", norm=LogNorm())
    picture.colorbar(image, ax=axes, label="largest error of the three products")
    axes.set_xticks(range(found.shape[1]), found.columns, rotation=45, ha="right", fontsize=SMALLEST)
    axes.set_yticks(range(len(found)), found.index, fontsize=SMALLEST)
    for label in axes.get_yticklabels():
        label.set_fontweight("bold" if label.get_text() in worst else "normal")
    picture.suptitle(literal(f"{title}\nbold: the {WORST} worst layers; gray: not finite"))
    save_picture(picture, path)
