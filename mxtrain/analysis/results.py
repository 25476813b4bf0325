"""A run's settings and final numbers as one row: from folders of runs and comparisons, and from CSV files."""

import csv
import io
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from mxtrain.analysis.runs import Run, load_run, variants
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as
from mxtrain.run_folder.comparison import COMPARISON_FILE, read_comparison
from mxtrain.run_folder.files import FACTS_FILE, LOG_FREQ, METRICS_FILE, STEPS

FIELDS = {
    "date": ("date", str, ""), "model": ("model", str, ""), "flavor": ("flavor", str, ""),
    "variant": ("variant", str, ""), "lr": ("lr", float, ""), "seed": ("seed", int, "d"), "steps": ("steps", int, "d"),
    "tokens": ("tokens", int, "d"), "validation": ("validation", float, ".4f"),
    "validation_step": ("validation_step", int, "d"), "last_10_percent": ("tail", float, ".4f"),
    "tokens_per_second": ("tokens_per_second", float, ".0f"), "memory_gib": ("memory_gib", float, ".2f"),
    "device": ("device", str, ""), "torch": ("torch", str, ""),
}  # fmt: skip
"""Column of a CSV -> field of a Result, type and format"""
HASHES = {"tokenizer": "tokenizer", "train_text": "train", "validation_text": "validation"}
"""Column of a CSV -> key in ``Result.text``"""
COLUMNS = (*FIELDS, *HASHES)
REQUIRED = ("variant", "lr", "seed", "steps", "last_10_percent")
"""Columns without which a row says nothing"""
HASH_DIGITS = 12
"""Shown of a hash"""

WINDOW = 20
"""Number of logged losses with which the next one is compared"""
DEVIATIONS = 6.0
"""Smallest height of a spike, in the window's standard deviations by its median absolute deviation"""
HEIGHT = 0.1
"""Smallest height of a spike in nats"""
SPIKE_RULE = (
    f"a spike is a logged loss more than {DEVIATIONS:g} standard deviations and {HEIGHT:g} nats above the median of "
    f"the {WINDOW} logged losses before it (deviations by 1.4826 times the median absolute deviation); neighbours "
    f"count as one, and the first {WINDOW} logged losses of a run cannot be spikes"
)


@dataclass(frozen=True)
class Result:
    """The final numbers of a run. Losses are in nats, and tokens per second are per device. None: not known."""

    name: str
    variant: str
    lr: float | None
    seed: int | None
    steps: int
    """Last logged step"""
    tail: float
    """Mean training loss of the last 10 % of the logged steps"""
    model: str = ""
    """``model.name``"""
    flavor: str = ""
    """``model.flavor``, and each setting of ``[model_args]``: "125M n_layers=4\""""
    tokens: int | None = None
    validation: float | None = None
    """The last validation loss"""
    validation_step: int | None = None
    """The step after which that was"""
    tokens_per_second: float | None = None
    memory_gib: float | None = None
    device: str = ""
    torch: str = ""
    date: str = ""
    text: Mapping[str, str] = field(default_factory=dict)
    """What the run read, by the keys of ``comparison.TEXT``; empty if not known. A row of a CSV has hashes only"""
    spikes: int | None = None
    problem: str = ""
    """Why the run does not count in means: its losses are not finite, or it has not ended"""
    run: Run | None = None
    """The curves; a row of a CSV has none"""

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.tail) and (self.validation is None or math.isfinite(self.validation))


def result_of(run: Run, variant: str | None = None) -> Result:
    """Return the numbers of a run.

    Args:
        variant: its name in a comparison; None for the converter and its settings (``Run.variant``), or the folder's
            name where the run does not tell them.
    """
    last, versions = run.training[-1], run.facts.get("versions") or {}
    flavor = str(run.facts.get("flavor") or run.setting("model", "flavor") or "")
    return Result(
        name=run.name,
        variant=variant or run.variant or run.name,
        lr=run.learning_rate,
        seed=run.setting("debug", "seed"),
        **curve_numbers(run),
        model=str(run.facts.get("model") or run.setting("model", "name") or ""),
        flavor=" ".join(
            [flavor, *(f"{name}={value}" for name, value in sorted(run.settings.get("model_args", {}).items()))]
        ),
        tokens=last.get("tokens_seen"),
        validation=run.validation_loss,
        validation_step=run.validation[-1]["step"] if run.validation else None,
        device=str(run.facts.get("device") or ""),
        torch=str(versions.get("torch") or ""),
        text=run.text,
        date=date.fromtimestamp(last["time"]).isoformat() if last.get("time") is not None else "",
        problem=_problem(run),
        run=run,
    )


def curve_numbers(run: Run) -> dict[str, float | int | None]:
    """Return the fields of a Result that follow from the logged training steps, of which ``run`` may have a part."""
    return {
        "steps": run.training[-1]["step"],
        "tail": run.tail_loss,
        "tokens_per_second": run.tokens_per_second,
        "memory_gib": run.peak_memory_gib,
        "spikes": len(spikes([row["loss"] for row in run.training])),
    }


def spikes(losses: Sequence[float]) -> list[int]:
    """Return the positions in ``losses`` (nats) at which a spike begins; see SPIKE_RULE.

    Losses that are not finite are no spikes, and are left out of windows.
    """
    found, was_high = [], False
    for position in range(WINDOW, len(losses)):
        is_high = False
        before = [loss for loss in losses[position - WINDOW : position] if math.isfinite(loss)]
        if before and math.isfinite(losses[position]):
            median = statistics.median(before)
            deviation = 1.4826 * statistics.median(abs(loss - median) for loss in before)
            is_high = losses[position] - median > max(DEVIATIONS * deviation, HEIGHT)
        if is_high and not was_high:
            found.append(position)
        was_high = is_high
    return found


def nonfinite_loss(run: Run) -> str:
    """Say where a loss of the run, its weights or its optimizer states are NaN or infinite; empty if all are finite."""
    if run.first_nonfinite_step is not None:
        return f"its loss is not finite at step {run.first_nonfinite_step}"
    if run.nonfinite_end:
        return f"its {run.nonfinite_end}"
    # Training losses are from before a step's update, so the last update may show in the validation alone.
    step = next((row["step"] for row in run.validation if not math.isfinite(row["validation_loss"])), None)
    return "" if step is None else f"its validation loss is not finite at step {step}"


def _problem(run: Run) -> str:
    last, planned = run.training[-1]["step"], run.setting("training", "steps", STEPS)
    # The last logged step may be so many before the end, less one. Without settings, the end is not known.
    is_early = run.settings and last + run.setting("metrics", "log_freq", LOG_FREQ) <= planned
    return nonfinite_loss(run) or (f"it ends at step {last} of {planned}" if is_early else "")


def read_results(path: str | os.PathLike) -> list[Result]:
    """Return the results in a CSV with ``COLUMNS``, in any order.

    Raises ConfigError if the file cannot be read, lacks a column of REQUIRED, or has a row that cannot be used.
    """
    path = Path(path)
    with os_errors_as(f"{path} cannot be read"):
        content = path.read_bytes()
    try:
        text = content.decode("utf-8-sig")  # Excel's "CSV UTF-8" begins with a BOM
        reader = csv.DictReader(io.StringIO(text, newline=""))
        rows, header = list(reader), reader.fieldnames or []
    except (csv.Error, ValueError) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if missing := [name for name in REQUIRED if name not in header]:
        raise ConfigError(
            f"{path} has no column {missing[0]!r}; 'mxtrain report' reads the columns {', '.join(COLUMNS)}"
        )
    results = []
    for number, row in enumerate(rows, start=2):  # the header is line 1
        try:
            results.append(_result_in(row, f"{path.name}, line {number}"))
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    return results


def _result_in(row: dict, name: str) -> Result:
    if None in row:  # two rows in one line, for example
        raise ValueError("it has more values than the header has columns")
    values = {}
    for column, (key, type_, _) in FIELDS.items():
        text = (row.get(column) or "").strip()
        if not text and column in ("variant", "steps", "last_10_percent"):
            raise ValueError(f"{column} is empty")
        try:
            values[key] = type_(text) if text or type_ is str else None
        except ValueError:
            raise ValueError(f"{column} = {text!r} is not a number") from None
    if values["lr"] is not None and not math.isfinite(values["lr"]):
        raise ValueError(f"lr = {values['lr']} is not finite")
    text = {key: row[column] for column, key in HASHES.items() if row.get(column)}
    result = Result(name=name, **values, text=text)
    return result if result.is_finite else replace(result, problem="its loss is not finite")


def read_sources(paths: list[Path]) -> tuple[list[Result], list[str]]:
    """Return the results in folders of runs and comparisons, folders of these, and CSVs, in the order of ``paths``.

    Also returns a line for whatever cannot be read.
    """
    found: list[tuple[Run, str | None] | Result] = []  # a run has the name of its variant in a comparison
    notes: list[str] = []
    for path in [one for given in paths for one in _inside(given)]:
        try:
            if path.is_file():
                found += read_results(path)
                continue
            planned = read_comparison(path)
        except ConfigError as error:
            notes.append(str(error))
            continue
        for folder, variant in [(path / run.name, run.variant) for run in planned.values()] or [(path, None)]:
            try:
                found.append((load_run(folder), variant))
            except ConfigError as error:
                notes.append(str(error))
    # The name of a run's variant depends on all other runs.
    runs = [one for one in found if not isinstance(one, Result)]
    names = iter(variants(*zip(*runs)) if runs else [])
    return [one if isinstance(one, Result) else result_of(one[0], next(names)) for one in found], notes


def _inside(path: Path) -> list[Path]:
    """Return the runs and comparisons in a folder that is neither; ``path`` itself if there are none."""
    files = (METRICS_FILE, FACTS_FILE, COMPARISON_FILE)  # a run that failed before its first logged step has no metrics
    # Unlike Path's, these functions raise no error for a folder that may not be searched.
    if not os.path.isdir(path) or any(os.path.exists(path / name) for name in files):
        return [path]
    return sorted({file.parent for name in files for file in path.glob(f"*/{name}")}) or [path]
