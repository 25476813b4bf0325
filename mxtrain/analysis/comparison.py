"""Compares results: means over seeds and paired differences to a baseline, by variant and learning rate.

Results of different models, and rows of a CSV of different lengths, are compared apart. Runs of one model whose curves
have different lengths are compared at the last number of tokens (or steps) that all of them have.
"""

import statistics
from collections.abc import Iterable
from dataclasses import dataclass, replace

from mxtrain.analysis.estimates import Estimate, estimate, paired_difference
from mxtrain.analysis.labels import flat_settings
from mxtrain.analysis.pairing import STEPS, other_batches, other_texts, unpaired
from mxtrain.analysis.results import Result, curve_numbers, nonfinite_loss
from mxtrain.analysis.runs import Run
from mxtrain.errors import ConfigError


@dataclass(frozen=True)
class Cell:
    """One variant at one learning rate. Losses are in nats, and their differences are to the baseline."""

    variant: str
    lr: float | None
    count: int
    """Number of runs, one per seed"""
    validation: Estimate | None
    tail: Estimate
    validation_difference: Estimate | None
    """None without a pair, and for the baseline"""
    tail_difference: Estimate | None
    spikes: int | None
    """In all runs; None if none of them has a curve"""
    tokens_per_second: float | None
    """Mean over the runs, per device"""
    memory_gib: float | None
    """The largest of the runs' peaks"""


@dataclass(frozen=True)
class Group:
    """Results that can be compared."""

    title: str
    baseline: str
    results: list[Result]
    """Those that count; of equal length"""
    cells: list[Cell]
    """By learning rate, then in the order in which the variants came"""
    notes: list[str]
    """What a reader must know: results that do not count, other settings, shorter curves, seeds without a pair"""


def compare(results: list[Result], baseline: str | None = None) -> list[Group]:
    """Return the groups of ``results`` that can be compared, in the order in which they came.

    Args:
        baseline: name of a variant; None for the first variant of each group.

    Raises ConfigError if no result counts, or no variant has the name ``baseline``.
    """
    variants = list(dict.fromkeys(result.variant for result in results))
    if baseline is not None and baseline not in variants:
        raise ConfigError(f"--baseline {baseline!r} is not one of the variants: {', '.join(map(repr, variants))}")
    keys = [_key(result) for result in results]
    parts = ([result for result, other in zip(results, keys) if other == key] for key in dict.fromkeys(keys))
    groups, lost = [], []
    for part in parts:
        counted, notes = _counted(part)
        if counted:
            groups.append(_group(counted, notes, list(dict.fromkeys(result.variant for result in part)), baseline))
        else:  # no run of this part counts
            lost += notes
    if not groups:
        problems = "; ".join(f"{result.name}: {result.problem}" for result in results)
        raise ConfigError(f"no run has finite losses to compare: {problems}" if results else "there are no runs")
    groups[0].notes.extend(lost)
    return groups


def _key(result: Result) -> tuple:
    # A curve can be cut to another's length, and a row of a CSV cannot.
    return (result.model, result.flavor, None if result.run else result.tokens or result.steps)


def _group(counted: list[Result], notes: list[str], variants: list[str], baseline: str | None) -> Group:
    """The comparison of the results that count; ``variants`` are those of all results, in their order."""
    settings = [(r.variant, flat_settings(r.run)) for r in counted if r.run and r.run.settings]
    notes += unpaired(settings, left_out=(STEPS,))
    notes += [f"{r.name} ({r.variant}): {line}" for r in counted if r.run for line in r.run.changed_settings]
    notes += other_texts((r.name, r.text) for r in counted)
    notes += other_batches((r.name, r.tokens, r.steps) for r in counted if r.tokens and r.steps)
    counted, more = _cut_to_one_length(counted)
    more += _early_validation(counted)
    names = [name for name in variants if any(result.variant == name for result in counted)]
    wanted = variants[0] if baseline is None else baseline
    chosen = wanted if wanted in names else names[0]
    if chosen != wanted:
        notes.append(f"no run of the baseline {wanted!r} counts here: differences are to {chosen!r}")
    cells = []
    for lr in sorted({result.lr for result in counted}, key=lambda lr: (lr is not None, lr)):
        at_rate = {name: [r for r in counted if r.variant == name and r.lr == lr] for name in names}
        cells += [_cell(members, at_rate[chosen]) for members in at_rate.values() if members]
        more += _unpaired(at_rate, chosen, lr)
    return Group(_title(counted), chosen, counted, cells, notes + more)


def _counted(results: list[Result]) -> tuple[list[Result], list[str]]:
    """Return the results that count in means, one per variant, learning rate and seed, and a line for each other."""
    notes, found = [], {}
    has_ended = any(not result.problem for result in results)
    for result in results:
        # A curve that is cut may end where its loss is not finite.
        is_finite = result.is_finite and not (result.run and nonfinite_loss(result.run))
        if result.problem and (has_ended or not is_finite):
            notes.append(f"{result.name} ({result.variant}): does not count: {result.problem}")
            continue
        if result.problem:
            notes.append(f"{result.name} ({result.variant}): {result.problem}; no run has ended yet")
        # Runs without a seed are different draws.
        key = (result.variant, result.lr, _place_of(result) if result.seed is None else result.seed)
        if earlier := found.get(key):
            names = [earlier.name, result.name]
            if names[0] == names[1]:
                names = [_place_of(earlier), _place_of(result)]
            notes.append(
                f"{' and '.join(names)} have the same variant ({result.variant}), learning rate and seed: "
                f"only {names[1]}, which came last, counts"
            )
        found[key] = result
    return list(found.values()), notes


def _place_of(result: Result) -> str:
    """Return a run's folder, or the line of a CSV."""
    return str(result.run.folder.resolve()) if result.run else result.name


def _cut_to_one_length(results: list[Result]) -> tuple[list[Result], list[str]]:
    """Cut longer curves to the shortest. Results without a curve are of one length."""
    if any(result.run is None for result in results):
        return results, []
    unit = "tokens" if all(result.tokens for result in results) else "steps"
    lengths = [getattr(result, unit) for result in results]
    shortest = results[lengths.index(min(lengths))]
    notes = []
    if min(lengths) < max(lengths):
        notes.append(
            f"curves have different lengths ({min(lengths):,} to {max(lengths):,} {unit}): all are compared after "
            f"{min(lengths):,} {unit}, where {shortest.name} ends. Where the learning rate decays, longer runs had a "
            "higher one there"
        )
    places = [{_place(row["step"], result, unit): row for row in result.run.validation} for result in results]
    common = set.intersection(*[set(own) for own in places if own]) if any(places) else set()
    last = max(common, default=None)
    if any(places) and last is None:
        notes.append("the runs were not validated after the same number of tokens: validation is not compared")
    cut = []
    for result, own in zip(results, places):
        run = _cut(result.run, unit, min(lengths))
        validated = own.get(last, {})
        values = {"validation": validated.get("validation_loss"), "validation_step": validated.get("step")}
        values |= {"tokens": min(lengths)} if unit == "tokens" else {}
        cut.append(replace(result, **curve_numbers(run), **values))
    return cut, notes


def _early_validation(results: list[Result]) -> list[str]:
    """Return a line if validation losses are from before the last logged step."""
    places = {(result.validation_step, result.steps) for result in results if result.validation_step is not None}
    early = sorted(place for place in places if place[0] < place[1])
    if not early:
        return []
    shown = ", ".join(f"{step:,} of {steps:,}" for step, steps in early)
    return [f"validation losses are not from the end: the last common validation was after step {shown}"]


def _place(step: int, result: Result, unit: str) -> int:
    """Return where a step is on the axis of tokens or steps."""
    return step if unit == "steps" else round(step * result.tokens / result.steps)


def _cut(run: Run, unit: str, length: int) -> Run:
    key = "step" if unit == "steps" else "tokens_seen"
    kept = [row for row in run.training if row.get(key) is not None and row[key] <= length]
    return replace(run, training=kept or run.training[:1])


def _cell(members: list[Result], baseline: list[Result]) -> Cell:
    is_baseline = members is baseline
    losses, differences = {}, {}
    for name in ("validation", "tail"):
        known = [value for member in members if (value := getattr(member, name)) is not None]
        losses[name] = estimate(known) if len(known) == len(members) else None
        pairs = (_by_seed(members, name), _by_seed(baseline, name))
        differences[f"{name}_difference"] = None if is_baseline else paired_difference(*pairs)
    spikes = [member.spikes for member in members if member.spikes is not None]
    rates = [member.tokens_per_second for member in members if member.tokens_per_second is not None]
    return Cell(
        variant=members[0].variant,
        lr=members[0].lr,
        count=len(members),
        **losses,
        **differences,
        spikes=sum(spikes) if spikes else None,
        tokens_per_second=statistics.fmean(rates) if rates else None,
        memory_gib=max((m.memory_gib for m in members if m.memory_gib is not None), default=None),
    )


def _by_seed(results: Iterable[Result], name: str) -> dict[int, float]:
    values = {result.seed: getattr(result, name) for result in results}
    return {seed: value for seed, value in values.items() if seed is not None and value is not None}


def _unpaired(at_rate: dict[str, list[Result]], baseline: str, lr: float | None) -> list[str]:
    """Return a line for each variant that has runs without a partner of the same seed in the baseline."""
    seeds = {result.seed for result in at_rate[baseline]} - {None}
    lines = []
    for name, members in at_rate.items():
        alone = [str("none" if m.seed is None else m.seed) for m in members if m.seed not in seeds]
        if name != baseline and alone:
            at = "" if lr is None else f" at learning rate {lr:g}"
            lines.append(f"{name}{at}: no pair with the baseline for seed {', '.join(alone)}")
    return lines


def _title(results: list[Result]) -> str:
    first = results[0]
    length = f"{first.tokens:,} tokens" if first.tokens else f"{first.steps:,} steps"
    return ", ".join(word for word in (f"{first.model} {first.flavor}".strip(), length) if word)
