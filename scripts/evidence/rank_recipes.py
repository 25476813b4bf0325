"""Does a rehearsal predict the loss? Print both by recipe, and their rank correlation.

python scripts/evidence/rank_recipes.py scripts/evidence/recipes_125m.csv scripts/evidence/recipes_125m/errors.csv

The first file is from ``collect.py``, the second from ``mxtrain rehearse``. Only runs with p = 2 and AdamW count, and
none in mode fp8_merged. A recipe's error is the largest of fprop, dgrad and wgrad, as a mean over layers.
"""

import math
import sys

import pandas as pd
from scipy.stats import spearmanr


def by_recipe(losses: pd.DataFrame, errors: pd.DataFrame) -> pd.DataFrame:
    """Return recipe -> its error and its validation losses by seed, by rising error."""
    recipe = losses["variant"].str.extract(r"^mxnorm (.*) p=2$", expand=False)
    losses = losses.assign(recipe=recipe).dropna(subset="recipe")
    found = losses.pivot(index="recipe", columns="seed", values="validation").dropna(axis="columns").add_prefix("seed ")
    return found.assign(error=errors.groupby("recipe")["error"].mean()).sort_values("error")


def rank_correlation(x: pd.Series, y: pd.Series) -> tuple[float, float, float]:
    """Return Spearman's correlation, and the ends of its 95 % interval (Bonett and Wright, 2000)."""
    r = float(spearmanr(x, y).statistic)
    most = 1 - 6 / (len(x) ** 3 - len(x))  # one exchange of neighbors; the transform of 1 is infinite
    z, half = math.atanh(max(-most, min(r, most))), 1.96 * math.sqrt((1 + r * r / 2) / (len(x) - 3))
    return r, math.tanh(z - half), math.tanh(z + half)


if __name__ == "__main__":
    table = by_recipe(*map(pd.read_csv, sys.argv[1:]))
    print(table.round(4).to_string())
    r, low, high = rank_correlation(table["error"], table.drop(columns="error").mean(axis=1))
    print(f"rank correlation of error and mean loss over {len(table)} recipes: {r:.2f} [{low:.2f}, {high:.2f}]")
