"""The check of a job against the machine and its model, before a text is read and weights are made."""

import math
from collections.abc import Mapping

import torch

from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.machine import ONE_STAGE, Machine, check_machine, degree, parts_problem
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.data import check_data
from mxtrain.titan.job_config import check_model
from mxtrain.titan.layouts import HAS_PIPELINES
from mxtrain.titan.releases import engine

TENSOR, PIPELINE, EXPERT = (f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "expert"))


def check_job(settings: Settings, machine: Machine) -> None:
    """Check what ``read_settings`` has read against the machine and the model.

    Raises:
        ConfigError: for every mistake that shows without the model's weights and the content of its text.
    """
    job = settings.values
    check_machine(settings, machine)
    check_model(job)
    check_model_layout(settings)
    check_data(job)
    if job.model.converters:
        convert_on_meta(job, engine().build_on_meta(job))


def check_model_layout(settings: Settings) -> None:
    """Raise ConfigError for degrees of parallelism that the model does not allow."""
    raise_first(engine().layout_problems(settings), settings)
    raise_first(_layout_problems(settings, engine().sizes_of(settings.values)), settings)


def _layout_problems(settings: Settings, sizes: Mapping[str, object]) -> Problems:
    model = f"{settings['model.name']} {settings['model.flavor']}"
    for name, kind in (("n_heads", "heads"), ("n_kv_heads", "key-value heads")):
        if (number := sizes.get(name)) and number % degree(settings, "tensor"):
            yield TENSOR, f"does not divide the {number} {kind} of {model}"
    if degree(settings, "pipeline") > 1:
        yield from _pipeline_problems(settings, sizes, model)
    if (degree_of_experts := degree(settings, "expert")) > 1:
        if not (experts := sizes.get("num_experts", 0)):
            yield EXPERT, f"needs experts, which {model} does not have: allowed is 1"
        elif experts % degree_of_experts:
            yield EXPERT, f"does not divide the {experts} experts of {model}"


def _pipeline_problems(settings: Settings, sizes: Mapping[str, object], model: str) -> Problems:
    """A model that cannot be divided into stages, and stages that would make another model."""
    if not HAS_PIPELINES:
        yield PIPELINE, f"needs PyTorch 2.13 or newer, and this is {torch.__version__}: allowed is 1"
    if sizes.get("enable_weight_tying"):
        apart = f"separates the embedding of {model} from the head, which has the same weight"
        yield PIPELINE, f"{apart}: allowed is 1"
    if problem := parts_problem(settings, sizes["n_layers"]):
        yield "parallelism.module_fqns_per_model_part", problem
    if problem := _stages_problem(settings, sizes["n_layers"]):
        yield PIPELINE, problem


def _stages_problem(settings: Settings, layers: int) -> str | None:
    """What is wrong with the number of stages that TorchTitan makes of so many layers; None if all is well."""
    schedule, ranks = settings["parallelism.pipeline_parallel_schedule"], degree(settings, "pipeline")
    try:
        stages = len(modules_of_stages(layers, settings.values.parallelism))
    except ValueError as error:
        return f"does not divide {layers} layers: {error}"
    if stages == ranks if schedule in ONE_STAGE else stages % ranks == 0 and stages > ranks:
        return None
    needed = ranks if schedule in ONE_STAGE else f"a multiple of {ranks}, and {2 * ranks} or more"
    return f"with schedule {schedule} needs {needed} stages, and the settings make {stages} of {layers} layers"


def modules_of_stages(layers: int, parallelism) -> list[list[str]]:
    """Return the names of the modules of every stage, as TorchTitan divides a model of so many layers.

    Raises ValueError for layers that cannot be divided.
    """
    if parallelism.module_fqns_per_model_part is not None:
        return parallelism.module_fqns_per_model_part
    first = parallelism.pipeline_parallel_first_stage_less_layers
    last = parallelism.pipeline_parallel_last_stage_less_layers
    if parallelism.pipeline_parallel_layers_per_stage is not None:
        stages = math.ceil((layers + first + last) / parallelism.pipeline_parallel_layers_per_stage)
    else:
        per_rank = 1 if parallelism.pipeline_parallel_schedule in ONE_STAGE else 2
        stages = parallelism.pipeline_parallel_degree * per_rank
    return engine().names_of_stages(stages, layers, first, last)
