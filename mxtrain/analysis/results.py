"""A run's settings and final numbers as one row: from the run's folder, and from and to a CSV of results."""

import csv
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import date
from pathlib import Path

from mxtrain.analysis.pairing import HASH_DIGITS
from mxtrain.analysis.runs import Run
from mxtrain.analysis.spikes import spikes
from mxtrain.errors import ConfigError
from mxtrain.files import reason

COLUMNS = (
    "date", "model", "flavor", "variant", "lr", "seed", "steps", "tokens", "validation", "validation_step",
    "last_10_percent", "tokens_per_second", "memory_gib", "device", "torch", "tokenizer", "train_text",
    "validation_text",
)  # fmt: skip
HASHES = {"tokenizer": "tokenizer", "train_text": "train", "validation_text": "validation"}
"""Column -> its key in ``Result.text``"""
REQUIRED = ("variant", "lr", "seed", "steps", "last_10_percent")
"""Columns of a CSV without which a row says nothing"""


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
    """What the run read, by the keys of ``pairing.TEXT``; empty if it is not known. A row of a CSV has hashes only"""
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
    last = run.training[-1]
    versions = run.facts.get("versions")
    flavor = str(run.facts.get("flavor") or run.setting("model", "flavor") or "")
    return Result(
        name=run.name,
        variant=variant or run.variant or run.name,
        lr=run.learning_rate,
        seed=_number(run.setting("debug", "seed"), int),
        **curve_numbers(run),
        model=str(run.facts.get("model") or run.setting("model", "name") or ""),
        flavor=" ".join([flavor, *(f"{name}={value}" for name, value in sorted(run.table("model_args").items()))]),
        tokens=_number(last.get("tokens_seen"), int),
        validation=run.validation_loss,
        validation_step=run.validation[-1]["step"] if run.validation else None,
        device=str(run.facts.get("device") or ""),
        torch=str(versions.get("torch") or "") if isinstance(versions, dict) else "",
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
    if problem := nonfinite_loss(run):
        return problem
    if run.planned_steps is not None and run.training[-1]["step"] + run.log_freq <= run.planned_steps:
        return f"it ends at step {run.training[-1]['step']} of {run.planned_steps}"
    return ""


def row_of(result: Result) -> dict[str, str]:
    """Return the result as a row of a CSV with ``COLUMNS``; "" where a number is not known."""
    values = (
        result.date, result.model, result.flavor, result.variant, _text(result.lr, ""), _text(result.seed, "d"),
        str(result.steps), _text(result.tokens, "d"), _text(result.validation, ".4f"),
        _text(result.validation_step, "d"), _text(result.tail, ".4f"), _text(result.tokens_per_second, ".0f"),
        _text(result.memory_gib, ".2f"), result.device, result.torch,
        *(result.text.get(key, "")[:HASH_DIGITS] for key in HASHES.values()),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def append_results(path: str | os.PathLike, results: list[Result]) -> None:
    """Append a row per result to a CSV, which is created if it does not exist.

    Raises ConfigError if the CSV has other columns: rows would not fit under its header.
    """
    is_new = not Path(path).exists()
    before = "" if is_new else Path(path).read_text(encoding="utf-8-sig")
    if not is_new and (header := before.partition("\n")[0]) != ",".join(COLUMNS):
        raise ConfigError(f"{path} has the columns {header!r}; rows are appended under {','.join(COLUMNS)!r} only")
    with open(path, "a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        elif not before.endswith("\n"):  # an editor has left the last line open
            file.write("\n")
        writer.writerows(map(row_of, results))


def read_results(path: str | os.PathLike) -> tuple[list[Result], list[str]]:
    """Read a CSV with ``COLUMNS``, in any order, and return its results and a line for each row that cannot be used.

    Raises ConfigError if the file cannot be read or lacks a column of REQUIRED.
    """
    path = Path(path)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:  # Excel's "CSV UTF-8" begins with a BOM
            reader = csv.DictReader(file)
            rows = list(reader)
            missing = [name for name in REQUIRED if name not in (reader.fieldnames or [])]
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    except (csv.Error, ValueError) as error:
        raise ConfigError(f"{path} is not a CSV file: {error}") from error
    if missing:
        raise ConfigError(
            f"{path} has no column {missing[0]!r}; 'mxtrain report' reads the columns {', '.join(COLUMNS)}"
        )
    results, notes = [], []
    for number, row in enumerate(rows, start=2):  # the header is line 1
        try:
            results.append(_result_in(row, f"{path.name}, line {number}"))
        except ValueError as error:
            notes.append(f"{path}, line {number}: left out: {error}")
    return results, notes


def _result_in(row: dict, name: str) -> Result:
    if None in row:  # two rows in one line, for example
        raise ValueError("it has more values than the header has columns")
    texts = {key: row.get(key) or "" for key in COLUMNS}
    numbers = {
        key: _parsed(texts, key, type_)
        for key, type_ in (
            ("lr", float), ("seed", int), ("steps", int), ("tokens", int), ("validation", float),
            ("validation_step", int), ("last_10_percent", float), ("tokens_per_second", float), ("memory_gib", float),
        )
    }  # fmt: skip
    if not texts["variant"]:
        raise ValueError("variant is empty")
    for key in ("steps", "last_10_percent"):
        if numbers[key] is None:
            raise ValueError(f"{key} is empty")
    if numbers["lr"] is not None and not math.isfinite(numbers["lr"]):
        raise ValueError(f"lr = {texts['lr'].strip()} is not finite")
    result = Result(
        name=name,
        tail=numbers.pop("last_10_percent"),
        **numbers,
        **{key: texts[key] for key in ("variant", "model", "flavor", "device", "torch", "date")},
        text={key: texts[column] for column, key in HASHES.items() if texts[column]},
    )
    return result if result.is_finite else replace(result, problem="its loss is not finite")


def _parsed(texts: dict[str, str], key: str, type_: type) -> float | int | None:
    text = texts[key].strip()
    try:
        return type_(text) if text else None
    except ValueError:
        raise ValueError(f"{key} = {text!r} is not a number") from None


def _number(value: object, type_: type) -> float | int | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return type_(value) if is_number and math.isfinite(value) else None


def _text(value: float | int | None, form: str) -> str:
    return "" if value is None else f"{value:{form}}"
