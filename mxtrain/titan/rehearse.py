"""``mxtrain rehearse``: the errors of every recipe in the layers of a run's checkpoint, or of a config's new model."""

import math
from pathlib import Path

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.analysis.rehearsal import draw, recipes_within, report, table_of, write_toml
from mxtrain.checkpoints.run_folder import CONFIG_FILE
from mxtrain.conversion.convert import apply
from mxtrain.conversion.converters import get_converter
from mxtrain.conversion.plan import Plan
from mxtrain.diagnostics.rehearsal import UNQUANTIZED, Rehearsal
from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as
from mxtrain.formats.hardware import default_device_type
from mxtrain.formats.parse import get_recipe, spec_of
from mxtrain.formats.recipe import GEMMS, HIGH_PRECISION_RECIPE, RECIPES, LinearRecipe
from mxtrain.parallel.initial_weights import DrawsByName
from mxtrain.rng.rounding import set_rounding_step
from mxtrain.settings.mxnorm_section import quantizing_among
from mxtrain.settings.read import places
from mxtrain.titan.data import first_sequences
from mxtrain.titan.hugging_face.export import open_run
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import engine


def candidates() -> dict[str, LinearRecipe]:
    """Every registered recipe that casts, by what a user writes for it."""
    recipes = {spec: get_recipe(spec) for spec in map(spec_of, RECIPES.values())}
    return {spec: recipe for spec, recipe in recipes.items() if recipe.quantizes}


def cost(recipe: LinearRecipe) -> float:
    """Return the time of a layer's three products relative to bf16, in proportion to the bits. Casts do not count.

    Formats without native products count as bf16. Recipes of equal cost keep the order of their registration.
    """
    formats = [gemm.format if gemm.format and gemm.format.is_native else None for gemm in recipe.gemms]
    return sum(1.0 if fmt is None else fmt.element_bits / 16 for fmt in formats) / len(GEMMS)


def rehearse(source: Path, folder: Path | None, bound: float, step: int | None = None) -> str:
    """Measure all recipes on the first sequences of the training text; write table, picture and TOML to ``folder``.

    Returns lines for the user.

    Args:
        source: a run's folder, or a config, whose model is then new.
        folder: None for "rehearsal" in the run's folder, or "outputs/NAME-rehearsal" for a config.
    """
    run = open_run(source, step) if (source / CONFIG_FILE).is_file() else None
    if run is None:
        if step is not None:
            raise ConfigError(f"--step = {step} needs the folder of a run, and RUN = {str(source)!r} is a config")
        arguments = [f"--job.config_file={source}", "--mxnorm.mode=auto"]
        with places(arguments):
            job = parse_job_config(arguments)
        sized, weights, of = engine().SizedModel.of_job(job), None, "a new model"
        folder = folder or Path("outputs", f"{source.stem}-rehearsal")
    else:
        job, sized, weights, of = run.settings.values, run.model, run.weights, f"step {run.step}"
        folder = folder or source / "rehearsal"
    device, recipes, tokens = torch.device(default_device_type()), candidates(), job.mxnorm.diagnostics.tokens
    model, seed = sized.on_meta(), job.debug.seed or 0
    plan = _convert(model, job, seed)
    _give_weights(model, seed, device, weights)
    with os_errors_as(f"{folder} cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
    rehearsal = Rehearsal(recipes, tokens, model, name_of=engine().saved_name)
    inputs, labels = (t.to(device) for t in first_sequences(job, math.ceil(tokens / job.training.seq_len)))
    set_rounding_step(0)  # the same random bits in every rehearsal
    with rehearsal.recording(), torch.autocast(device.type, torch.bfloat16):
        logits = model(inputs)
        F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()).backward()
    errors = table_of({names: found.tolist() for names, found in rehearsal.errors.items()})
    if errors["error"].isna().all():
        raise ConfigError(f"{source}, {of}: all errors are NaN, because weights or products are not finite")
    costs = {name: cost(recipe) for name, recipe in recipes.items()}
    with os_errors_as(f"{folder} cannot be written"):
        errors.to_csv(folder / "errors.csv", float_format="%.6g")
        write_toml(recipes_within(errors, costs, bound, plan.feeds.values()), folder / "recipes.toml")
    draw(errors, f"{source.name}, {of}: {tokens} tokens a layer", folder / "errors.png")
    return (
        f"{source}, {of}: errors of the products of {tokens} tokens a layer; cost: time of products over bf16's\n"
        f"{report(errors, costs, bound)}\n"
        f"errors   {folder / 'errors.csv'}, {folder / 'errors.png'}\n"
        f"recipes  {folder / 'recipes.toml'}: the cheapest within {bound:g}, else {HIGH_PRECISION_RECIPE}"
    )


def _convert(model: nn.Module, job, seed: int) -> Plan:
    """Swap the layers that the job swaps, or that "mxnorm" would, for layers in high precision that can be measured."""
    name = next(iter(quantizing_among(job.model.converters)), "mxnorm")
    section = job.mxnorm
    settings = {"recipe": UNQUANTIZED, "filter_fqns": section.filter_fqns, "graph_passes": False, "seed": seed}
    if name == "mxnorm":
        # In high precision there are no scales to estimate from.
        estimator = "pre_round" if section.estimator == "post_round" else section.estimator
        settings |= {"p": section.p, "estimator": estimator, "eps": section.eps}
        settings["gated_estimate_ratio"] = section.gated_estimate_ratio
    with engine().convertible(model):
        return apply(get_converter(name, settings), model, engine().example_inputs(model))


def _give_weights(model: nn.Module, seed: int, device: torch.device, saved) -> None:
    """Draw the weights of a new run on ``device``, and replace weights and buffers by saved ones, if there are any."""
    model.to_empty(device=device)
    with torch.no_grad(), DrawsByName(model, seed, device, engine().saved_name):
        model.init_weights(buffer_device=device)
    if saved is not None:
        state = {engine().saved_name(name): tensor for name, tensor in model.state_dict().items()}
        saved.load_into({name: tensor for name, tensor in state.items() if name in saved})
