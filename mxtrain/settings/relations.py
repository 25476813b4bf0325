"""Mistakes that take two settings to see, as a table: a setting, and what is wrong with it if anything."""

import math
import os
from collections.abc import Callable
from typing import NamedTuple

from mxtrain.errors import ConfigError
from mxtrain.recipes.schedule import CHANGE_KEYS
from mxtrain.settings.fields import unknown
from mxtrain.settings.mxnorm_section import GUARD, check_recipes
from mxtrain.settings.registry import (
    NORM_CONVERTERS,
    PIPELINE_SCHEDULES,
    ROUTER_CONVERTER,
    TITAN_QUANTIZING,
    quantizing_among,
)
from mxtrain.settings.values import Settings

DIAGNOSTICS = "mxnorm.diagnostics"


class Relation(NamedTuple):
    setting: str
    problem: Callable[..., str | bool | None]
    """(settings[, machine]) -> what is wrong with the setting and what is allowed; nothing if all is well"""


def unknown_among(name: str, allowed) -> str:
    return "" if name in allowed else f"is not one of: {', '.join(allowed)}"


def quantizing(s: Settings) -> list[str]:
    return quantizing_among(s["model.converters"])


def conflict_of_converters(names: list[str]) -> str | None:
    """What is wrong with these converters beside one another; None if all is well."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"has {twice!r} twice: name it once"
    ours = quantizing_among(names)
    for same in (ours, [name for name in names if name in NORM_CONVERTERS]):
        if len(same) > 1:
            return f"choose one of {same}"
    theirs = [name for name in names if name.startswith(TITAN_QUANTIZING)]
    if ours and theirs:
        return f"has {ours[0]!r} and {theirs[0]!r}, which both quantize: remove one of them"
    after_router = names[names.index(ROUTER_CONVERTER) :] if ROUTER_CONVERTER in names else []
    if later := [name for name in after_router if name.startswith(f"{TITAN_QUANTIZING}linear.")]:
        return (
            f"would replace the gates of {ROUTER_CONVERTER!r} by those of {later[0]!r}: name {later[0]!r} first, and "
            f"the gates in {later[0]}.filter_fqns"
        )
    return None


def _unknown_in(names: list[str], s: Settings) -> str | None:
    """What is wrong with a list of settings' names."""
    wrong = next((name for name in names if name not in s.known), None)
    return None if wrong is None else f"has a name that does not exist: {unknown(wrong, s.known)}"


def _leads_out(folder: str) -> bool:
    """Whether a path relative to another folder leads out of that folder, links aside."""
    return os.path.isabs(folder) or os.path.normpath(folder).split(os.sep)[0] == os.pardir


def _needs_workers(section: str, setting: str) -> Relation:
    loader = f"{section}.dataloader"
    return Relation(
        f"{loader}.{setting}",
        lambda s: s[f"{loader}.{setting}"] and not s[f"{loader}.num_workers"] and f"needs {loader}.num_workers > 0",
    )


RELATIONS = (
    Relation("model.converters", lambda s: conflict_of_converters(s["model.converters"])),
    Relation(
        "validation.seq_len",
        lambda s: (
            s["validation.enable"]
            and s["validation.seq_len"] > s["training.seq_len"]
            and f"is more than training.seq_len = {s['training.seq_len']}, the number of positions in the model; "
            "allowed is that or less"
        ),
    ),
    Relation(
        "training.dataset_path",
        lambda s: (
            s["training.dataset"] == "hf"
            and not s["training.dataset_path"]
            and "is missing: training.dataset = 'hf' needs the id of a Hugging Face dataset, such as 'allenai/c4'"
        ),
    ),
    _needs_workers("training", "prefetch_factor"),
    _needs_workers("training", "persistent_workers"),
    _needs_workers("validation", "prefetch_factor"),
    _needs_workers("validation", "persistent_workers"),
    Relation(
        "compile.components",
        lambda s: s["compile.enable"] and not s["compile.components"] and "is empty, so nothing would be compiled",
    ),
    Relation(
        "memory_estimation.enable",
        lambda s: (
            s["memory_estimation.enable"]
            and "has no effect in TorchTitan 0.2.2: 'mxtrain doctor --model CONFIG' shows the memory per GPU"
        ),
    ),
    Relation(
        "activation_checkpoint.mode",
        lambda s: (
            s["activation_checkpoint.mode"] == "memory_budget"
            and not s["compile.enable"]
            and "needs torch.compile: set compile.enable = true"
        ),
    ),
    Relation(
        "profiling.profile_freq",
        lambda s: (
            s["profiling.profile_freq"] < s["profiling.profiler_warmup"] + s["profiling.profiler_active"]
            and f"is less than profiling.profiler_warmup = {s['profiling.profiler_warmup']} plus "
            f"profiling.profiler_active = {s['profiling.profiler_active']}"
        ),
    ),
    *(
        Relation(
            f"checkpoint.{setting}",
            lambda s, setting=setting, unset=unset: (
                s[f"checkpoint.{setting}"] != unset
                and not s["checkpoint.enable"]
                and "has no effect without checkpoint.enable = true"
            ),
        )
        for setting, unset in {
            "load_step": -1,
            "initial_load_path": None,
            "exclude_from_loading": [],
            "create_seed_checkpoint": False,
            "load_only": False,
            "initial_load_in_hf": False,
            "may_change": [],
        }.items()
    ),
    Relation(
        "checkpoint.folder",
        lambda s: (
            s["checkpoint.enable"]
            and _leads_out(s["checkpoint.folder"])
            and "leads out of the run's folder, and another run could write there, too: name a folder in "
            "job.dump_folder, which may be a link"
        ),
    ),
    Relation(
        "checkpoint.exclude_from_loading",
        lambda s: (
            "train_state" in s["checkpoint.exclude_from_loading"]
            and "lr_scheduler" not in s["checkpoint.exclude_from_loading"]
            and "needs 'lr_scheduler' beside 'train_state': the run starts at step 1, and the learning rate would go "
            "on after the checkpoint's step, below zero in the end"
        ),
    ),
    Relation(
        "mxnorm.diagnostics.every",
        lambda s: (
            s["mxnorm.diagnostics.every"]
            and s["optimizer.early_step_in_backward"]
            and "needs optimizer.early_step_in_backward = false: its extra backward would change the weights"
        ),
    ),
    Relation(
        "mxnorm.diagnostics.fqns",
        lambda s: (
            s["mxnorm.diagnostics.every"]
            and s["mxnorm.diagnostics.fqns"] == []
            and "measures nothing: leave it unset to measure all modules, or set mxnorm.diagnostics.every = 0"
        ),
    ),
    *(
        Relation(
            f"{DIAGNOSTICS}.{setting}",
            lambda s, name=f"{DIAGNOSTICS}.{setting}": (
                f"{DIAGNOSTICS}.every" not in s.given  # a run may switch diagnostics off, with 0
                and s[name] != s.known[name].default
                and f"has no effect without {DIAGNOSTICS}.every: set it to 50, for example, to measure every 50th step"
            ),
        )
        for setting in ("fqns", "tokens")
    ),
    *(
        Relation(
            "optimizer.early_step_in_backward",
            lambda s, degree=f"parallelism.{kind}_parallel_degree": (
                s["optimizer.early_step_in_backward"]
                and s[degree] > 1
                and f"does not work with {degree} = {s[degree]} in TorchTitan 0.2.2: allowed is false"
            ),
        )
        for kind in ("pipeline", "expert")
    ),
    Relation(
        "training.max_norm",
        lambda s: (
            s["optimizer.early_step_in_backward"]
            and s["training.max_norm"] != math.inf
            and "has no effect with optimizer.early_step_in_backward = true, which uses up every gradient before the "
            "norm of all is known: set training.max_norm = inf, which clips nothing"
        ),
    ),
    *(
        Relation(
            f"{GUARD}.{setting}",
            lambda s, name=f"{GUARD}.{setting}": (
                bool(quantizing(s))
                and s[name] != s.known[name].default
                and all(s[f"{GUARD}.{key}"] is None for key in CHANGE_KEYS)
                and "has no effect without a guard: set one of " + ", ".join(f"{GUARD}.{key}" for key in CHANGE_KEYS)
            ),
        )
        for setting in ("window", "sigmas", "steps")
    ),
    Relation("checkpoint.may_change", lambda s: _unknown_in(s["checkpoint.may_change"] or [], s)),
    Relation(
        "checkpoint.export_dtype",
        lambda s: (
            s["checkpoint.export_dtype"] != "float32"
            and not s["checkpoint.last_save_model_only"]
            and "needs checkpoint.last_save_model_only = true: only the weights can be saved in that way"
        ),
    ),
    Relation(
        "lr_scheduler.total_steps",
        lambda s: (
            s["lr_scheduler.total_steps"] is not None
            and s["lr_scheduler.total_steps"] < s["training.steps"]
            and f"is less than training.steps = {s['training.steps']}: the learning rate would fall below zero after it"
        ),
    ),
    Relation(
        "checkpoint.last_save_in_hf",
        lambda s: (
            s["checkpoint.last_save_in_hf"]
            and "is not supported: it would write no config.json and no tokenizer, and lose the last checkpoint where "
            "something is missing; run 'mxtrain export RUN DIR' after the training"
        ),
    ),
    Relation(
        "checkpoint.initial_load_in_hf",
        lambda s: (
            s["checkpoint.initial_load_in_hf"]
            and not s["checkpoint.initial_load_model_only"]
            and "needs checkpoint.initial_load_model_only = true: such a checkpoint holds nothing but the model"
        ),
    ),
    Relation(
        "checkpoint.initial_load_in_hf_quantized",
        lambda s: (
            s["checkpoint.initial_load_in_hf_quantized"]
            and not s["checkpoint.initial_load_in_hf"]
            and "needs checkpoint.initial_load_in_hf = true"
        ),
    ),
    Relation(
        "parallelism.pipeline_parallel_schedule",
        lambda s: unknown_among(s["parallelism.pipeline_parallel_schedule"], PIPELINE_SCHEDULES),
    ),
)


def check_relations(settings: Settings) -> None:
    """Raise ConfigError for settings that do not go together."""
    check(RELATIONS, settings)
    if quantizing(settings):
        check_recipes(settings)


def check(relations: tuple[Relation, ...], settings: Settings, *machine) -> None:
    for relation in relations:
        if problem := relation.problem(settings, *machine):
            raise ConfigError(f"{relation.setting} = {settings[relation.setting]!r} {problem}")
