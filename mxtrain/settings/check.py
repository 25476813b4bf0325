"""Checks that involve two settings."""

import os
from importlib.metadata import version
from itertools import chain

from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.model_settings import model_problems
from mxtrain.settings.mxnorm_section import check_recipes, quantizing_among
from mxtrain.settings.releases import release
from mxtrain.settings.titan import unknown

ROUTER_CONVERTER = "decompose_k_router"
TITAN_QUANTIZING = "quantize."
"""How the names of TorchTitan's own converters begin"""


def check_settings(settings: Settings) -> None:
    """Raise ConfigError for settings that do not go together."""
    raise_first(chain(_problems(settings), _without_effect(settings), model_problems(settings)), settings)
    if quantizing_among(settings["model.converters"]):
        check_recipes(settings.values)


def conflict_of_converters(names: list[str]) -> str | None:
    """What is wrong with these converters, or with one beside another; None if all is well."""
    if twice := next((name for name in names if names.count(name) > 1), None):
        return f"has {twice!r} twice; name it once"
    ours = quantizing_among(names)
    if len(ours) > 1:
        return f"has {ours[0]!r} and {ours[1]!r}, which both swap linears; remove one of them"
    theirs = [name for name in names if name.startswith(TITAN_QUANTIZING)]
    if ours and theirs:
        return f"has {ours[0]!r} and {theirs[0]!r}, which both quantize; remove one of them"
    after_router = names[names.index(ROUTER_CONVERTER) :] if ROUTER_CONVERTER in names else []
    if later := [name for name in after_router if name.startswith(f"{TITAN_QUANTIZING}linear.")]:
        return (
            f"has {later[0]!r} after {ROUTER_CONVERTER!r}, whose gates it would replace; name {later[0]!r} first, and "
            f"the gates in {later[0]}.filter_fqns"
        )
    return None


def _problems(settings: Settings) -> Problems:
    s = settings.values
    steps, checkpoint = s.training.steps, s.checkpoint
    titan = release()
    for name in titan.gone.keys() & titan.own.keys():
        if settings.changed(name):
            yield name, f"is not a setting of TorchTitan {version('torchtitan')}: {titan.gone[name]}"
    option = "activation_checkpoint.selective_ac_option"
    if option in titan.own and settings.changed(option) and settings[option] != "op":
        every = "selects layers, but TorchTitan 0.3 selects operations in every layer; set it to 'op'"
        yield option, every
    if conflict := conflict_of_converters(s.model.converters):
        yield "model.converters", conflict
    if s.validation.enable and s.validation.seq_len > s.training.seq_len:
        more = f"is more than training.seq_len = {s.training.seq_len}, the number of positions in the model"
        yield "validation.seq_len", f"{more}; lower it to that or less"
    if s.lr_scheduler.total_steps is not None and s.lr_scheduler.total_steps < steps:
        less = f"is less than training.steps = {steps}, so the learning rate would fall below zero; raise it"
        yield "lr_scheduler.total_steps", less
    if s.optimizer.early_step_in_backward:
        yield "optimizer.early_step_in_backward", "is not supported: the optimizer steps after the backward; remove it"
    folder = os.path.normpath(checkpoint.folder)
    if checkpoint.enable and (os.path.isabs(folder) or folder.split(os.sep)[0] == os.pardir):
        yield (
            "checkpoint.folder",
            "is outside of the run's folder, where another run could write, too; name a folder in job.dump_folder, "
            "which may be a link",
        )
    if "train_state" in checkpoint.exclude_from_loading and "lr_scheduler" not in checkpoint.exclude_from_loading:
        yield (
            "checkpoint.exclude_from_loading",
            "has 'train_state' without 'lr_scheduler', so steps would start at 1 and the learning rate would go on "
            "after the checkpoint's step; add 'lr_scheduler'",
        )
    for name in checkpoint.may_change or []:
        if name not in settings.known:
            yield "checkpoint.may_change", f"has a wrong name: {unknown(name, settings.known)}"
    if checkpoint.last_save_in_hf:
        yield (
            "checkpoint.last_save_in_hf",
            "is not supported, because it writes no config.json and no tokenizer; run 'mxtrain export RUN DIR' after "
            "the training",
        )


def _without_effect(settings: Settings) -> Problems:
    """Settings that do nothing, because the one that they need is not set."""
    s = settings.values
    of_start = "load_step initial_load_path exclude_from_loading create_seed_checkpoint load_only initial_load_in_hf"
    needs = (
        (f"{of_start} may_change verify", s.checkpoint.enable, "checkpoint.enable = true"),
        ("export_dtype", s.checkpoint.last_save_model_only, "checkpoint.last_save_model_only = true"),
        ("initial_load_in_hf_quantized", s.checkpoint.initial_load_in_hf, "checkpoint.initial_load_in_hf = true"),
    )
    for names, is_set, needed in needs:
        for name in names.split():
            if not is_set and settings.changed(f"checkpoint.{name}"):
                yield f"checkpoint.{name}", f"has no effect without {needed}; set that, too, or remove it"
