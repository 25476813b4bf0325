"""Reads finished or running training runs from their folders, and names them so that they can be told apart."""

import math
import os
import statistics
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from mxtrain.analysis.metrics_file import EVENT, IMAGE_LAYERS, NUMERICS, read_metrics
from mxtrain.checkpoints.run_folder import (
    CONFIG_FILE,
    DATA_FILE,
    FACTS_FILE,
    LEARNING_RATE,
    LOG_FREQ,
    METRICS_FILE,
    SETTING_CHANGES,
    STEPS,
    no_run,
)
from mxtrain.errors import ConfigError
from mxtrain.files import read_json, read_toml

LABELED = {"model": "model.flavor", "lr": "optimizer.lr", "seed": "debug.seed"}
"""Word in a label -> setting"""

SHORT_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}

NONFINITE = " are not finite"
"""The end of the event of a run that ends because its weights, or the states of its optimizer, are NaN or infinite"""


@dataclass(frozen=True)
class Run:
    """The logs of a run. Losses are in nats per token and may be ``nan`` or ``inf``."""

    name: str
    folder: Path
    facts: dict
    """Content of ``run.json``; empty if the file is missing"""
    training: list[dict]
    """Rows of ``metrics.jsonl`` with a ``loss``; at least one"""
    validation: list[dict]
    """Rows with a ``validation_loss``"""
    settings: dict = field(default_factory=dict)
    """Content of ``config.toml``, which holds no defaults; empty if the file is missing or damaged"""
    events: list[dict] = field(default_factory=list)
    """Rows with an ``event``"""
    text: dict[str, str] = field(default_factory=dict)
    """Hashes of tokenizer and texts, from ``data.json``; empty if it is missing or damaged"""
    numerics: list[dict] = field(default_factory=list)
    """Rows of diagnostic steps"""

    @property
    def variant(self) -> str:
        """See ``variant_of``; with the optimizer, if it is not AdamW. Empty if ``run.json`` names no converter."""
        optimizer, variant = self.setting("optimizer", "name", "AdamW"), variant_of(self.facts)
        return variant if optimizer == "AdamW" or not variant else f"{variant}, {optimizer}"

    @property
    def first_loss(self) -> float:
        return self.training[0]["loss"]

    @property
    def last_loss(self) -> float:
        return self.training[-1]["loss"]

    @property
    def tail_loss(self) -> float:
        """Mean loss of the last 10 % of the training rows, at least one row."""
        tail = self.training[-max(1, round(0.1 * len(self.training))) :]
        return sum(row["loss"] for row in tail) / len(tail)

    @property
    def validation_loss(self) -> float | None:
        return self.validation[-1]["validation_loss"] if self.validation else None

    @property
    def tokens_per_second(self) -> float | None:
        """Median per device. Skips the first 10 % of the rows, which include compilation and warm-up."""
        rates = self._numbers("tokens_per_second")
        warm = rates[math.ceil(0.1 * len(rates)) :] or rates
        return statistics.median(warm) if warm else None

    @property
    def peak_memory_gib(self) -> float | None:
        """Per device."""
        return max(self._numbers("memory_gib"), default=None)

    def _numbers(self, key: str) -> list[float]:
        return [row[key] for row in self.training if row.get(key) is not None]

    @property
    def learning_rate(self) -> float | None:
        """The base learning rate; None without settings."""
        return float(self.setting("optimizer", "lr", LEARNING_RATE)) if self.settings else None

    def setting(self, section: str, name: str, default: object = None) -> object:
        """Return a setting; ``default`` where config.toml, which holds no defaults, does not set it."""
        return self.settings.get(section, {}).get(name, default)

    @property
    def first_nonfinite_step(self) -> int | None:
        return next((row["step"] for row in self.training if not math.isfinite(row["loss"])), None)

    @property
    def nonfinite_end(self) -> str:
        """Why and where the run ended, such as "weights are not finite after step 3"; empty for other ends."""
        ends = (f"{row[EVENT]} after step {row['step']}" for row in self.events if row[EVENT].endswith(NONFINITE))
        return next(ends, "")

    @property
    def nonfinite_loss(self) -> str:
        """What is not finite, such as "its loss is not finite at step 3"; empty if all is finite."""
        if self.first_nonfinite_step is not None:
            return f"its loss is not finite at step {self.first_nonfinite_step}"
        if self.nonfinite_end:
            return f"its {self.nonfinite_end}"
        # Training losses are from before a step's update, so the last update may show in the validation alone.
        step = next((row["step"] for row in self.validation if not math.isfinite(row["validation_loss"])), None)
        return "" if step is None else f"its validation loss is not finite at step {step}"

    @property
    def problem(self) -> str:
        """Why the run does not count in means: it is not finite, or has not ended; or empty."""
        last, planned = self.training[-1]["step"], self.setting("training", "steps", STEPS)
        # The last logged step may be so many before the end, less one. Without settings, the end is not known.
        is_early = self.settings and last + self.setting("metrics", "log_freq", LOG_FREQ) <= planned
        return self.nonfinite_loss or (f"it ends at step {last} of {planned}" if is_early else "")

    @property
    def image_layers(self) -> int:
        """Number of layers that mode "fp8_merged" gave up (``mxtrain.diagnostics.merge_guard``)."""
        counts = [row[EVENT].partition(IMAGE_LAYERS)[2] for row in self.events if IMAGE_LAYERS in row[EVENT]]
        return int(counts[-1].rstrip(")")) if counts else 0

    @property
    def changed_settings(self) -> list[str]:
        """The events of settings that changed when the run resumed. ``settings`` are those of its latest start."""
        return [row[EVENT] for row in self.events if SETTING_CHANGES in row[EVENT]]


def load_run(folder: str | os.PathLike) -> Run:
    """Read a run's ``metrics.jsonl`` and, if they exist, ``run.json``, ``config.toml`` and ``data.json``.

    Raises ConfigError if the folder or ``metrics.jsonl`` is missing, if no training step is logged, or if either
    file is damaged or cannot be read. A damaged last line of ``metrics.jsonl`` is dropped instead.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise ConfigError(f"run folder {str(folder)!r} {no_run(folder)}")
    rows = read_metrics(folder / METRICS_FILE)
    training = [row for row in rows if row.get("loss") is not None]
    if not training:
        raise ConfigError(f"{folder / METRICS_FILE} holds no training step yet; wait for the first logged step")
    settings, text = {}, {}
    with suppress(FileNotFoundError, ConfigError):  # they only tell runs apart
        settings = read_toml(folder / CONFIG_FILE)
    with suppress(OSError, ValueError, LookupError, TypeError, AttributeError):  # the file is missing or damaged
        kept = read_json(folder / DATA_FILE)
        # The held-out part of the training text is not always what the run is validated on.
        hashes = kept["identity"] | {"validation": kept.get("validation_text")}
        text = {name: str(value) for name, value in hashes.items() if value is not None}
    return Run(
        name=folder.resolve().name,
        folder=folder,
        facts=read_json(folder / FACTS_FILE) if (folder / FACTS_FILE).exists() else {},
        training=training,
        validation=[row for row in rows if row.get("validation_loss") is not None],
        events=[row for row in rows if EVENT in row],
        settings=settings,
        text=text,
        numerics=[row for row in rows if any(key.startswith(NUMERICS) for key in row)],
    )


def variant_of(facts: dict) -> str:
    """Return the converter and its settings in a few words: "mxnorm mxfp8 p=2", "mx_linear mxfp8", "bf16", "fp32".

    Recipes for single layers and entries of a schedule are counted, and other converters are listed:
    "mxnorm mxfp8 + 2 by name p=2 + 1 scheduled, fused_norm". Empty if ``facts`` name no converter.
    """
    converter = facts.get("converter")
    if converter is None:
        return ""
    others = [name for name in facts.get("converters") or [] if name != converter]
    if converter == "none":
        compute = (facts.get("precision") or "").partition(" ")[0]
        words = [SHORT_DTYPES.get(compute, compute or "high precision")]
    else:
        words = [converter, facts.get("recipe")]
    if by_name := facts.get("recipes"):
        words.append(f"+ {len(by_name)} by name")
    if converter == "mxnorm":
        estimator = facts.get("estimator")
        words.append(None if estimator == "exact" else f"p={facts.get('p')}")  # the exact RMS has no p
        words.append(None if estimator == "pre_round" else estimator)
    if facts.get("mode") == "fp8_merged":  # all other modes have the same operands
        words.append("fp8_merged")
    if scheduled := facts.get("schedule"):
        words.append(f"+ {len(scheduled)} scheduled")
    return ", ".join([" ".join(word for word in words if word), *others])


def names(runs: list[Run]) -> list[str]:
    """Return a name per run: the folder's name, or its path if another run has the same name."""
    names = [run.name for run in runs]
    return [run.name if names.count(run.name) == 1 else str(run.folder) for run in runs]


def labels(runs: list[Run]) -> list[str]:
    """Return a label per run: its name, its variant, and LABELED settings in which the runs differ.

    For example "a (mxnorm mxfp8 p=2, lr 0.001, default seed)".
    """
    settings = {word: [run.setting(*name.split(".")) for run in runs] for word, name in LABELED.items()}
    found = []
    for index, (run, name) in enumerate(zip(runs, names(runs), strict=True)):
        words = [run.variant] if run.variant else []
        for word, values in settings.items():
            if any(value != values[0] for value in values):
                words.append(f"default {word}" if values[index] is None else f"{word} {values[index]}")
        found.append(f"{name} ({', '.join(words)})" if words else name)
    return found
