"""The check of a job's names and layout against TorchTitan 0.2.2's models."""

from types import SimpleNamespace

from torchtitan.models import _supported_models
from torchtitan.protocols import model_converter, train_spec

from mxtrain.errors import require_one_of
from mxtrain.settings.fields import Problems, Settings, raise_first
from mxtrain.settings.machine import degree
from mxtrain.settings.model_settings import given_in
from mxtrain.settings.read import import_own
from mxtrain.titan.check_job import ModelFacts, layout_problems
from mxtrain.titan.data import check_datasets
from mxtrain.titan.v02.models import is_tied

CONTEXT = "parallelism.context_parallel_degree"


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
        args.set_model_args(given_in(settings.values))
    raise_first(_context_problems(settings, args, has_gpus), settings)
    has_experts = getattr(args, "moe_enabled", hasattr(args, "moe_args"))
    facts = ModelFacts(
        n_layers=args.n_layers,
        heads={"heads": args.n_heads, "key-value heads": getattr(args, "n_kv_heads", None)},
        experts=args.moe_args.num_experts if has_experts else 0,
        is_tied=is_tied(args),
        has_stages=train_spec.get_train_spec(settings["model.name"]).pipelining_fn is not None,
    )
    raise_first(layout_problems(settings, facts), settings)


def _context_problems(settings: Settings, args, has_gpus: bool) -> Problems:
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
