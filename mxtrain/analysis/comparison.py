"""Compares results: means over seeds, and differences to a baseline with confidence intervals.

A result is a row: a run's settings and final numbers, from its folder or from a CSV. A pair is a run and the
baseline's run with the same learning rate and seed. Results of different models or lengths are compared apart.
"""

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mxtrain.analysis.runs import Run
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as

if TYPE_CHECKING:
    import pandas as pd

NUMBERS = {
    "lr": float, "seed": int, "steps": int, "tokens": int, "validation": float, "validation_step": int,
    "last_10_percent": float, "tokens_per_second": float, "memory_gib": float,
}  # fmt: skip
"""Columns with numbers, and their types. Losses are in nats, and tokens per second are per device"""
COLUMNS = {
    "date": "", "model": "", "flavor": "", "variant": "", "lr": "", "seed": "d", "steps": "d", "tokens": "d",
    "validation": ".4f", "validation_step": "d", "last_10_percent": ".4f", "tokens_per_second": ".0f",
    "memory_gib": ".2f", "device": "", "torch": "", "tokenizer": ".12", "train_text": ".12", "validation_text": ".12",
}  # fmt: skip
"""Column of a CSV -> format. A row of a run has more keys; a number that is not known is None, a text is empty"""
REQUIRED = ("variant", "lr", "seed", "steps", "last_10_percent")
"""Columns without which a row says nothing"""
LOSSES = ("validation", "last_10_percent")
DTYPES = dict.fromkeys(NUMBERS, float) | {"seed": object}

TEXT = {
    "tokenizer": "tokenizer ({}): their losses are per token of different tokenizers",
    "train_text": "training text ({}): their runs are not paired step by step",
    "validation_text": "validation text ({}): their validation losses are not of the same text",
}
"""Key of a row, the hash of a text -> what a difference means. Runs of equal settings may read other files"""

CONFIDENCE = 0.95


def row_of(run: Run, variant: str | None = None) -> dict:
    """Return the row of a run: COLUMNS and three keys more.

    ``name`` is that of its folder, ``problem`` says why the run does not count in means, and ``changes`` are the events
    of settings that changed when the run resumed. Without ``variant``, its variant is ``Run.variant`` or its name.
    """
    last, facts, text = run.training[-1], run.facts, run.text
    sizes = (f"{name}={value}" for name, value in sorted(run.settings.get("model_args", {}).items()))
    return {
        "date": date.fromtimestamp(last["time"]).isoformat() if last.get("time") is not None else "",
        "model": str(facts.get("model") or run.setting("model", "name") or ""),
        "flavor": " ".join([str(facts.get("flavor") or run.setting("model", "flavor") or ""), *sizes]),
        "variant": variant or run.variant or run.name,
        "lr": run.learning_rate,
        "seed": run.setting("debug", "seed"),
        "steps": last["step"],
        "tokens": last.get("tokens_seen"),
        "validation": run.validation_loss,
        "validation_step": run.validation[-1]["step"] if run.validation else None,
        "last_10_percent": run.tail_loss,
        "tokens_per_second": run.tokens_per_second,
        "memory_gib": run.peak_memory_gib,
        "device": str(facts.get("device") or ""),
        "torch": str((facts.get("versions") or {}).get("torch") or ""),
        **{key: text.get(key.removesuffix("_text"), "") for key in TEXT},
        "name": run.name,
        "problem": run.problem,
        "changes": run.changed_settings,
    }


def read_results(path: Path) -> list[dict]:
    """Return the rows of a CSV with COLUMNS, in any order."""
    try:
        with os_errors_as(f"{path} cannot be read"), path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            lines, names = list(reader), reader.fieldnames or []
    except (csv.Error, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if missing := [name for name in REQUIRED if name not in names]:
        raise ConfigError(f"{path} has no column {missing[0]!r}; its first line must name {', '.join(REQUIRED)}")
    rows = []
    for number, cells in enumerate(lines, start=2):  # the header is line 1
        place = f"{path}, line {number}"
        if None in cells:
            raise ConfigError(f"{place}: the line has more values than the header has columns; remove some")
        row: dict = {name: (cells[name] or "").strip() if name in names else "" for name in COLUMNS}
        if empty := [name for name in ("variant", "steps", "last_10_percent") if not row[name]]:
            raise ConfigError(f"{place}: {empty[0]} is empty; fill it in, or remove the line")
        for name, type_ in NUMBERS.items():
            try:
                row[name] = type_(row[name]) if row[name] else None
            except ValueError:
                raise ConfigError(f"{place}: {name} = {row[name]!r} is not a number; correct or empty it") from None
        is_finite = np.isfinite([row[loss] for loss in LOSSES if row[loss] is not None]).all()
        problem = "" if is_finite else "its loss is not finite"
        rows.append(row | {"name": f"{path.name}, line {number}", "problem": problem, "changes": []})
    return rows


class Estimate(NamedTuple):
    """The mean of independent values, and how well they determine it. All but the mean are NaN for one value."""

    mean: float
    error: float
    """Standard error of the mean: the sample's standard deviation / sqrt(count)"""
    low: float
    """``low`` and ``high`` are the ends of the confidence interval of Student's t around the mean"""
    high: float
    count: int


def estimate(values: "pd.Series") -> Estimate | None:
    """Return the mean of ``values``, its standard error and its interval; None if there are no values."""
    from scipy.stats import t

    if values.empty:
        return None
    mean, error = values.mean(), values.sem()
    half_width = t.ppf((1 + CONFIDENCE) / 2, len(values) - 1) * error
    return Estimate(mean, error, mean - half_width, mean + half_width, len(values))


@dataclass(frozen=True)
class Group:
    """Results that can be compared."""

    title: str
    baseline: str
    results: "pd.DataFrame"
    """The rows that count, and each loss minus that of the baseline's run with the same learning rate and seed.

    The columns ``validation_difference`` and ``last_10_percent_difference`` are NaN without a pair, and for the
    baseline.
    """
    cells: "pd.DataFrame"
    """A row per learning rate and variant, the variants in the order in which they came.

    ``count`` is the number of runs. ``validation`` and ``last_10_percent`` are Estimates over all of them, and the
    differences over pairs, or None. ``tokens_per_second`` is the mean, ``memory_gib`` the largest; NaN if not known.
    """
    notes: list[str]
    """What a reader must know: results that do not count, other settings, seeds without a pair"""

    @property
    def loss(self) -> str:
        """The loss that figures show: "validation" if all runs have it, else "last_10_percent"."""
        return next(loss for loss in LOSSES if self.cells[loss].notna().all())


def compare(rows: list[dict], baseline: str | None = None, variants: Sequence[str] = ()) -> list[Group]:
    """Return the groups of ``rows`` that can be compared, in the order in which they came.

    ``baseline`` is the first variant if it is None. ``variants`` also has names without a row.
    """
    names = list(dict.fromkeys([*variants, *(row["variant"] for row in rows)]))
    if baseline is not None and baseline not in names:
        raise ConfigError(f"--baseline {baseline!r} is not one of the variants: {', '.join(map(repr, names))}")
    if all(row["problem"] for row in rows):
        problems = "; ".join(f"{row['name']}: {row['problem']}" for row in rows)
        raise ConfigError(f"no run has finite losses to compare: {problems}" if rows else "no run was given to compare")
    notes = [f"{row['name']} ({row['variant']}): does not count: {row['problem']}" for row in rows if row["problem"]]
    parts: dict[tuple, list[dict]] = {}
    for row in rows:
        if not row["problem"]:
            parts.setdefault((row["model"], row["flavor"], row["tokens"] or row["steps"]), []).append(row)
    groups = [
        _group(part, [name for name in names if name in {row["variant"] for row in part}], baseline or names[0])
        for part in parts.values()
    ]
    groups[0].notes[:0] = notes
    return groups


def _group(rows: list[dict], variants: list[str], baseline: str) -> Group:
    import pandas as pd

    notes = []
    for key, effect in TEXT.items():
        if shown := differing((row["name"], row[key][:12]) for row in rows if row[key]):
            notes.append(f"runs differ in their {effect.format(shown)}")
    notes += [f"{row['name']} ({row['variant']}): {line}" for row in rows for line in row["changes"]]
    batches = [(row["name"], f"{row['tokens'] / row['steps']:,.10g}") for row in rows if row["tokens"] and row["steps"]]
    if shown := differing(batches):
        notes.append(f"runs differ in tokens per step ({shown}): they are not paired step by step")
    places = {(row["validation_step"], row["steps"]) for row in rows if row["validation_step"] is not None}
    if early := ", ".join(f"{step:,} of {steps:,}" for step, steps in sorted(places) if step < steps):
        notes.append(f"validation losses are not from the end: the last validation was after step {early}")
    chosen = baseline if baseline in variants else variants[0]
    if chosen != baseline:
        notes.append(f"no run of the baseline {baseline!r} counts here: differences are to {chosen!r}")
    # Seeds stay exact integers, or None.
    columns = {key: pd.Series([row[key] for row in rows], dtype=DTYPES.get(key, object)) for key in rows[0]}
    columns["variant"] = pd.Categorical(columns["variant"], variants)  # groups are in this order
    table = pd.DataFrame(columns)
    is_early = table.seed.notna() & table.duplicated(["variant", "lr", "seed"], keep="last")
    again = "does not count: a later one has the same variant, learning rate and seed"
    notes += [f"{name} {again}" for name in table.name[is_early]]
    table = table[~is_early]
    # What a seed does to both runs of a pair cancels, so the difference is known better than each mean.
    base = table.loc[(table.variant == chosen) & table.seed.notna(), ["lr", "seed", *LOSSES]]
    table = table.merge(base, "left", ["lr", "seed"], suffixes=("", "_base"), indicator="partner")
    for loss in LOSSES:
        table[f"{loss}_difference"] = (table[loss] - table.pop(f"{loss}_base")).where(table.variant != chosen)
    cells = []
    for (rate, variant), own in table.groupby(["lr", "variant"], dropna=False, observed=True):
        means = {loss: estimate(own[loss]) if own[loss].notna().all() else None for loss in LOSSES}
        differences = {f"{loss}_difference": estimate(own[f"{loss}_difference"].dropna()) for loss in LOSSES}
        speed = {"tokens_per_second": own.tokens_per_second.mean(), "memory_gib": own.memory_gib.max()}
        cells.append({"lr": rate, "variant": variant, "count": len(own), **means, **differences, **speed})
        alone = own.seed[own.partner == "left_only"].map(lambda seed: "none" if seed is None else str(seed))
        if variant != chosen and len(alone):
            at = "" if pd.isna(rate) else f" at learning rate {rate:g}"
            notes.append(f"{variant}{at}: no pair with the baseline for seed {', '.join(alone)}")
    first = rows[0]
    length = f"{first['tokens']:,} tokens" if first["tokens"] else f"{first['steps']:,} steps"
    title = f"{first['model']} {first['flavor']}".strip()
    return Group(f"{title}, {length}" if title else length, chosen, table, pd.DataFrame(cells), notes)


def differing(values: Iterable[tuple[str, str]]) -> str:
    """Return every value with the runs that have it, "64 in a and 2 more, 128 in b"; empty if there is one value."""
    having: dict[str, list[str]] = {}
    for name, value in values:
        having.setdefault(value, []).append(name)
    words = [f"{v} in {first}" + (f" and {len(more)} more" if more else "") for v, (first, *more) in having.items()]
    return ", ".join(words) if len(words) > 1 else ""
