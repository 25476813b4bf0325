"""Compares results: means over seeds and paired differences to a baseline, by variant and learning rate.

Results of different models, and rows of a CSV of different lengths, are compared apart. Runs of one model whose curves
have different lengths are compared at the last number of tokens (or steps) that all of them have.
"""

import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mxtrain.analysis.results import HASH_DIGITS, Result, curve_numbers, nonfinite_loss
from mxtrain.analysis.runs import flat_settings
from mxtrain.errors import ConfigError

STEPS = "training.steps"
"""Changes the learning rate's schedule. The steps of finished runs are compared by their curves instead"""

PAIRING_SETTINGS = (
    "training.dataset", "training.dataset_path", "training.seq_len", "training.global_batch_size",
    "training.local_batch_size", STEPS, "data.installed", "data.other_files", "data.vocab_size", "data.max_bytes",
    "data.package_share", "data.validation_share", "data.seed", "data.text_key", "data.hf_config", "data.prepared",
    "model.name", "model.flavor", "model.hf_assets_path", "model.tokenizer_path", "checkpoint.initial_load_path",
    "checkpoint.initial_load_in_hf", "validation.dataset", "validation.dataset_path", "validation.steps",
    "validation.seq_len", "validation.local_batch_size", "metrics.log_freq",
)  # fmt: skip
"""
Settings in which paired runs must agree: they read the same text in the same steps, start from equal weights, are
validated on the same text, and log the same steps. So are all of ``MODEL_ARGS``
"""
MODEL_ARGS = "model_args."

NOT_PAIRED = "their runs are not paired step by step"
OTHER_VALIDATION = "their validation losses are not of the same text"
EFFECTS = {
    "validation.": OTHER_VALIDATION,
    MODEL_ARGS: "their models differ",
    "metrics.": "their last 10 % and their spikes are computed from other steps",
    "checkpoint.": "their runs do not start from equal weights",
}
"""Beginning of a setting's name -> the effect of a difference; of other settings it is NOT_PAIRED"""

TEXT = {
    "tokenizer": ("tokenizer", "their losses are per token of different tokenizers"),
    "train": ("training text", NOT_PAIRED),
    "validation": ("validation text", OTHER_VALIDATION),
    "sequences": ("number of sequences per validation", OTHER_VALIDATION),
    "stream": ("version of a stream", "they may have read other text, and are then not paired step by step"),
    "held_out": ("share held out of a stream", NOT_PAIRED),
}
"""
Key in a run's ``data.json`` -> what it identifies, and the effect of a difference. Files may change between two runs of
equal settings
"""
OPTIONAL = ("validation", "sequences", "stream")
"""Keys of TEXT that a run may lack: it was not validated, streams no text, or an earlier version made it"""

CONFIDENCE = 0.95
T_UP_TO_9 = (12.7062047, 4.3026527, 3.1824463, 2.7764451, 2.5705818, 2.4469119, 2.3646243, 2.3060041, 2.2621572)
"""Student's t for 1 to 9 degrees of freedom: [-t, t] holds the share CONFIDENCE of the distribution"""


@dataclass(frozen=True)
class Estimate:
    """The mean of independent values, and how well they determine it."""

    mean: float
    count: int
    error: float | None
    """Standard error of the mean: the sample's standard deviation / sqrt(count). None for one value"""
    by_seed: Mapping[Hashable, float] = field(default_factory=dict)
    """Of paired differences: seed -> difference"""

    @property
    def interval(self) -> tuple[float, float]:
        """The ends of the confidence interval of Student's t around the mean; for one value, twice this value."""
        half_width = 0.0 if self.error is None else student_t(self.count - 1) * self.error
        return self.mean - half_width, self.mean + half_width


def estimate(values: Sequence[float]) -> Estimate | None:
    """Return the mean of ``values`` and its standard error; None if there are no values."""
    if not values:
        return None
    error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
    return Estimate(statistics.fmean(values), len(values), error)


def student_t(degrees: int) -> float:
    """Return t for so many degrees of freedom, at least 1; see T_UP_TO_9. The relative error is below 1e-5.

    Source of the series: Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.5, for the 97.5th percentile.
    """
    if degrees <= len(T_UP_TO_9):
        return T_UP_TO_9[degrees - 1]
    return 1.959964 + 2.372271 / degrees + 2.822502 / degrees**2 + 2.555852 / degrees**3 + 1.589536 / degrees**4


def paired_difference(values: Mapping[Hashable, float], baseline: Mapping[Hashable, float]) -> Estimate | None:
    """Return the mean of ``values[seed] - baseline[seed]`` over the seeds in both; None if they share none.

    What a seed does to both runs of a pair cancels, so the difference is known better than each mean.
    """
    by_seed = {seed: value - baseline[seed] for seed, value in values.items() if seed in baseline}
    found = estimate(list(by_seed.values()))
    return found and replace(found, by_seed=by_seed)


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
    parts: dict[tuple, list[Result]] = {}
    for result in results:
        # A curve can be cut to another's length, and a row of a CSV cannot.
        length = None if result.run else result.tokens or result.steps
        parts.setdefault((result.model, result.flavor, length), []).append(result)
    groups, lost = [], []
    for part in parts.values():
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
            place = _place_of(result)
            notes.append(
                f"{_place_of(earlier)} and {place} have the same variant ({result.variant}), learning rate and seed: "
                f"only {place}, which came last, counts"
            )
        found[key] = result
    return list(found.values()), notes


def _place_of(result: Result) -> str:
    """Return a run's folder, or the line of a CSV."""
    return str(result.run.folder.resolve()) if result.run else result.name


def _group(counted: list[Result], notes: list[str], variants: list[str], baseline: str | None) -> Group:
    """The comparison of the results that count; ``variants`` are those of all results, in their order."""
    settings = [(r.variant, flat_settings(r.run)) for r in counted if r.run and r.run.settings]
    notes += unpaired(settings, left_out=(STEPS,))
    notes += [f"{r.name} ({r.variant}): {line}" for r in counted if r.run for line in r.run.changed_settings]
    notes += other_texts((r.name, r.text) for r in counted)
    batches = [(r.name, f"{r.tokens / r.steps:,.10g}") for r in counted if r.tokens and r.steps]
    if shown := _differing(batches):
        notes.append(f"runs differ in tokens per step ({shown}): they are not paired step by step")
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
        more += _unpaired_seeds(at_rate, chosen, lr)
    first = counted[0]
    length = f"{first.tokens:,} tokens" if first.tokens else f"{first.steps:,} steps"
    title = ", ".join(word for word in (f"{first.model} {first.flavor}".strip(), length) if word)
    return Group(title, chosen, counted, cells, notes + more)


def _cut_to_one_length(results: list[Result]) -> tuple[list[Result], list[str]]:
    """Cut longer curves to the shortest. Results without a curve are of one length."""
    if any(result.run is None for result in results):
        return results, []
    unit, key = ("tokens", "tokens_seen") if all(result.tokens for result in results) else ("steps", "step")
    lengths = [getattr(result, unit) for result in results]
    length = min(lengths)
    notes = []
    if length < max(lengths):
        notes.append(
            f"curves have different lengths ({length:,} to {max(lengths):,} {unit}): all are compared after "
            f"{length:,} {unit}, where {results[lengths.index(length)].name} ends. Where the learning rate decays, "
            "longer runs had a higher one there"
        )
    # Where each run was validated, on the axis of tokens or steps.
    places = [
        {row["step"] if unit == "steps" else round(row["step"] * r.tokens / r.steps): row for row in r.run.validation}
        for r in results
    ]
    common = set.intersection(*[set(own) for own in places if own]) if any(places) else set()
    last = max(common, default=None)
    if any(places) and last is None:
        notes.append("the runs were not validated after the same number of tokens: validation is not compared")
    cut = []
    for result, own in zip(results, places):
        rows = [row for row in result.run.training if row.get(key) is not None and row[key] <= length]
        numbers = curve_numbers(replace(result.run, training=rows or result.run.training[:1]))
        validated = own.get(last, {})
        numbers |= {"validation": validated.get("validation_loss"), "validation_step": validated.get("step")}
        cut.append(replace(result, **numbers, **({"tokens": length} if unit == "tokens" else {})))
    return cut, notes


def _early_validation(results: list[Result]) -> list[str]:
    """Return a line if validation losses are from before the last logged step."""
    places = {(result.validation_step, result.steps) for result in results if result.validation_step is not None}
    shown = ", ".join(f"{step:,} of {steps:,}" for step, steps in sorted(places) if step < steps)
    return [f"validation losses are not from the end: the last common validation was after step {shown}"] * bool(shown)


def _cell(members: list[Result], baseline: list[Result]) -> Cell:
    losses, differences = {}, {}
    for name in ("validation", "tail"):
        known = _known(members, name)
        losses[name] = estimate(known) if len(known) == len(members) else None
        pairs = (_by_seed(members, name), _by_seed(baseline, name))
        differences[f"{name}_difference"] = None if members is baseline else paired_difference(*pairs)
    spikes, rates = _known(members, "spikes"), _known(members, "tokens_per_second")
    return Cell(
        variant=members[0].variant,
        lr=members[0].lr,
        count=len(members),
        **losses,
        **differences,
        spikes=sum(spikes) if spikes else None,
        tokens_per_second=statistics.fmean(rates) if rates else None,
        memory_gib=max(_known(members, "memory_gib"), default=None),
    )


def _known(results: Iterable[Result], name: str) -> list[float]:
    return [value for result in results if (value := getattr(result, name)) is not None]


def _by_seed(results: Iterable[Result], name: str) -> dict[int, float]:
    values = {result.seed: getattr(result, name) for result in results}
    return {seed: value for seed, value in values.items() if seed is not None and value is not None}


def _unpaired_seeds(at_rate: dict[str, list[Result]], baseline: str, lr: float | None) -> list[str]:
    """Return a line for each variant that has runs without a partner of the same seed in the baseline."""
    seeds = {result.seed for result in at_rate[baseline]} - {None}
    lines = []
    for name, members in at_rate.items():
        alone = [str("none" if m.seed is None else m.seed) for m in members if m.seed not in seeds]
        if name != baseline and alone:
            at = "" if lr is None else f" at learning rate {lr:g}"
            lines.append(f"{name}{at}: no pair with the baseline for seed {', '.join(alone)}")
    return lines


def unpaired(runs: Iterable[tuple[str, Mapping[str, object]]], left_out: tuple[str, ...] = ()) -> list[str]:
    """Return a line for each of PAIRING_SETTINGS, and of MODEL_ARGS, in which runs differ.

    Args:
        runs: variant and settings by full name, per run. A setting that is missing has its default.
        left_out: settings that are not compared.
    """
    runs, lines = list(runs), []
    sizes = sorted({name for _, own in runs for name in own if name.startswith(MODEL_ARGS)})
    for name in (*PAIRING_SETTINGS, *sizes):
        values = dict.fromkeys((variant, repr(own[name]) if name in own else "default") for variant, own in runs)
        if name not in left_out and (shown := _differing(values)):
            effect = next((effect for begin, effect in EFFECTS.items() if name.startswith(begin)), NOT_PAIRED)
            lines.append(f"variants differ in {name} ({shown}): {effect}")
    return lines


def other_texts(runs: Iterable[tuple[str, Mapping[str, str]]]) -> list[str]:
    """Return a line for each part of TEXT in which runs differ.

    Args:
        runs: name and hashes per run. A run without hashes is not compared, and one without a key of OPTIONAL
            not by that key.
    """
    runs, lines = [(name, own) for name, own in runs if own], []
    for key, (what, effect) in TEXT.items():
        compared = [(name, own.get(key, "none")) for name, own in runs if key in own or key not in OPTIONAL]
        if shown := _differing((name, value[:HASH_DIGITS]) for name, value in compared):
            lines.append(f"runs differ in their {what} ({shown}): {effect}")
    return lines


def _differing(values: Iterable[tuple[str, str]]) -> str:
    """Return every value with the runs that have it, "64 in a and 2 more, 128 in b"; empty if there is one value."""
    having: dict[str, list[str]] = {}
    for name, value in values:
        having.setdefault(value, []).append(name)
    words = [f"{v} in {first}" + (f" and {len(more)} more" if more else "") for v, (first, *more) in having.items()]
    return ", ".join(words) if len(words) > 1 else ""
