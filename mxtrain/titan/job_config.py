"""The settings of a job, with the checks that need TorchTitan, the machine or the model.

``job.custom_config_module = "mxtrain.titan.job_config"`` names this module, whose ``JobConfig`` TorchTitan
merges into its own.
"""

from collections.abc import Mapping

import torch

from mxtrain.errors import require_one_of
from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.machine import Machine, check_machine, degree, parts_problem
from mxtrain.settings.model_settings import absent, given_in, refuse, wrong_sizes
from mxtrain.settings.read import import_own, read_settings
from mxtrain.settings.sections import JobConfig as JobConfig
from mxtrain.titan.converters import active_settings, convert_on_meta
from mxtrain.titan.data import check_data, check_datasets
from mxtrain.titan.layouts import HAS_PIPELINES
from mxtrain.titan.releases import engine

TENSOR, PIPELINE, EXPERT = (f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "expert"))


def parse_job_config(args: list[str]):
    """Return a job's settings as attributes, after all checks that need no machine, no built model and no data."""
    job = read_settings(args).values
    check_model(job)
    return job


def check_model(job) -> None:
    """Raise ConfigError for names that nobody has registered, wrong settings of converters, and impossible sizes.

    Args:
        job: ``Settings.values``, or TorchTitan's job config.
    """
    if own := job.experimental.custom_import:
        import_own("experimental.custom_import", own)  # it registers names; TorchTitan imports it later
    require_one_of("model.name", job.model.name, engine().models())
    require_one_of("model.flavor", job.model.flavor, engine().SizedModel.flavors(job.model.name))
    for name in job.model.converters:
        require_one_of("model.converters", name, engine().converters())
    check_datasets(job)
    active_settings(job)
    if given := given_in(job):
        model, sizes = job.model.name, engine().sizes_of(job)
        has_experts = "num_experts" in sizes
        refuse(given, (*absent(model, job.model.flavor, has_experts), *wrong_sizes(model, sizes)))


def check_job(settings: Settings, machine: Machine) -> None:
    """Find all mistakes that show without the model's weights and the content of its text."""
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
        if not HAS_PIPELINES:
            yield PIPELINE, f"needs PyTorch 2.13 or newer, and this is {torch.__version__}: allowed is 1"
        if sizes.get("enable_weight_tying"):
            apart = f"separates the embedding of {model} from the head, which has the same weight"
            yield PIPELINE, f"{apart}: allowed is 1"
        if problem := parts_problem(settings, sizes["n_layers"]):
            yield "parallelism.module_fqns_per_model_part", problem
    if (degree_of_experts := degree(settings, "expert")) > 1:
        if not (experts := sizes.get("num_experts", 0)):
            yield EXPERT, f"needs experts, which {model} does not have: allowed is 1"
        elif experts % degree_of_experts:
            yield EXPERT, f"does not divide the {experts} experts of {model}"
