"""The check of a job's names and layout against TorchTitan 0.2.2's models."""

import math
from types import SimpleNamespace

import torch
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part
from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter, train_spec

from mxtrain.errors import require_one_of
from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.layout import ONE_STAGE, degree, parts_problem
from mxtrain.settings.model_settings import given_model_args
from mxtrain.settings.read import import_own
from mxtrain.titan.data import check_datasets
from mxtrain.titan.pipeline_stage import FINDS_SHAPES_AGAIN
from mxtrain.titan.v02.models.llama3 import is_tied

TENSOR, PIPELINE, CONTEXT, EXPERT = (
    f"parallelism.{kind}_parallel_degree" for kind in ("tensor", "pipeline", "context", "expert")
)


def check_names(job: SimpleNamespace) -> None:
    """Raise ConfigError for a model, flavor, converter or dataset that nobody has registered."""
    if own := job.experimental.custom_import:
        import_own("experimental.custom_import", own)  # it registers names; TorchTitan imports it later
    models = sorted(_supported_models - {"flux"} | train_spec._extra_train_specs.keys())  # flux has its own trainer
    require_one_of("model.name", job.model.name, models)
    flavors = train_spec.get_train_spec(job.model.name).model_args
    require_one_of("model.flavor", job.model.flavor, flavors)
    for name in job.model.converters:
        require_one_of("model.converters", name, model_converter._registry_model_converter_cls)
    check_datasets(job)


def check_model_layout(settings: Settings, has_gpus: bool) -> None:
    """Raise ConfigError for degrees of parallelism that the flavor of a model does not allow, with or without GPUs."""
    args = train_spec.get_train_spec(settings["model.name"]).model_args[settings["model.flavor"]]
    if getattr(args, "takes_model_args", False):
        args.set_model_args(given_model_args(settings))
    raise_first(_problems(settings, args, has_gpus), settings)


def _problems(settings: Settings, args, has_gpus: bool) -> Problems:
    name = settings["model.name"]
    model = f"{name} {settings['model.flavor']}"
    if degree(settings, "context") > 1:
        attention = getattr(args, "attn_type", "sdpa")
        # In TorchTitan 0.2.2 Llama 3 alone has flex attention under context parallelism; PyTorch has it for GPUs.
        allowed = ["sdpa", "flex"] if name == "llama3" and has_gpus else ["sdpa"]
        if attention not in allowed:
            yield CONTEXT, f"works with attention {' or '.join(allowed)}, and {model} has {attention!r}: allowed is 1"
        balancer = "parallelism.context_parallel_load_balancer"
        if settings[balancer] == "ptrr" and attention == "sdpa":
            yield balancer, f"needs flex attention, and {model} has 'sdpa': allowed is 'headtail'"
    for kind, field in (("heads", "n_heads"), ("key-value heads", "n_kv_heads")):
        if (number := getattr(args, field, None)) and number % degree(settings, "tensor"):
            yield TENSOR, f"does not divide the {number} {kind} of {model}"
    if degree(settings, "pipeline") > 1:
        yield from _pipeline_problems(settings, args, model)
    if (experts := degree(settings, "expert")) > 1:
        number = args.moe_args.num_experts if getattr(args, "moe_enabled", hasattr(args, "moe_args")) else 0
        if not number:
            yield EXPERT, f"needs experts, which {model} does not have: allowed is 1"
        elif number % experts:
            yield EXPERT, f"does not divide the {number} experts of {model}"


def _pipeline_problems(settings: Settings, args, model: str) -> Problems:
    """A model that cannot be divided into stages, and stages that would make another model."""
    if train_spec.get_train_spec(settings["model.name"]).pipelining_fn is None:
        yield PIPELINE, f"does not work with {model}: allowed is 1"
    if is_tied(args):
        apart = f"separates the embedding of {model} from the head, which has the same weight"
        yield PIPELINE, f"{apart}: allowed is 1"
    if problem := parts_problem(settings, args.n_layers):
        yield "parallelism.module_fqns_per_model_part", problem
    if problem := _stages_problem(settings, args.n_layers):
        yield PIPELINE, problem
    for name in ("local_batch_size", "seq_len"):
        allowed = settings[f"training.{name}"]
        if not FINDS_SHAPES_AGAIN and settings["validation.enable"] and settings[f"validation.{name}"] != allowed:
            only = f"a pipeline in PyTorch {torch.__version__} allows only {allowed}"
            yield f"validation.{name}", f"differs from training.{name}: {only}"


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
    return generate_llm_fqn_per_model_part(stages, layers, first, last)
