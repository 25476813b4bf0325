"""What the rest of mxtrain uses of TorchTitan 0.3."""

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part

from mxtrain.data.config import DATASETS
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.settings.fields import Settings, raise_first
from mxtrain.settings.model_settings import absent, given_in, refuse, wrong_sizes
from mxtrain.settings.read import import_own
from mxtrain.titan.model_layout import ModelFacts, layout_problems
from mxtrain.titan.v03.config import same, trainer_config
from mxtrain.titan.v03.models import FLAVORS, model_spec, sizes_of
from mxtrain.titan.v03.names import name_in_022 as saved_name
from mxtrain.titan.v03.parallelize import convertible as convertible
from mxtrain.titan.v03.parallelize import split_layers
from mxtrain.titan.v03.settings import GONE as GONE
from mxtrain.titan.v03.settings import JobConfig as JobConfig
from mxtrain.titan.v03.settings import refuse_gone
from mxtrain.titan.v03.sized_model import SizedModel as SizedModel
from mxtrain.titan.v03.sized_model import multiply_experts_in_fp32 as multiply_experts_in_fp32

HEAD = "lm_head"
"""The name of the output head in a model"""
FSDP_ON_ONE_PROCESS = True
"""Whether one process gathers weights, too"""


def __getattr__(name: str):
    # The trainer imports what imports this module.
    if name == "Trainer":
        from mxtrain.titan.v03.trainer import Trainer

        return Trainer
    raise AttributeError(name)


def example_inputs(model: nn.Module) -> tuple:
    """Arguments for one forward pass of a language model: token ids."""
    return (torch.zeros(1, 32, dtype=torch.long),)


def vocab_size(job_config) -> int:
    """The model's vocabulary size: ``data.vocab_size``, or the flavor's if that is 0."""
    require_one_of("model.flavor", job_config.model.flavor, FLAVORS[job_config.model.name])
    return sizes_of(job_config)["vocab_size"]


def check_names(job) -> None:
    """Raise ConfigError for a model, flavor or converter that nobody has registered, or what 0.3 does not have."""
    from mxtrain.conversion.converters import CONVERTERS
    from mxtrain.titan.data import check_datasets, validation_dataset

    if own := job.experimental.custom_import:
        import_own("experimental.custom_import", own)
    refuse_gone(job)
    require_one_of("model.name", job.model.name, FLAVORS)
    require_one_of("model.flavor", job.model.flavor, FLAVORS[job.model.name])
    for name in job.model.converters:
        require_one_of("model.converters", name, CONVERTERS)
    check_datasets(job)
    if job.validation.enable:  # whose text mxtrain's loaders read
        require_one_of("validation.dataset", validation_dataset(job), DATASETS)


def check_model_args(job) -> None:
    """Raise ConfigError for settings of ``[model_args]`` that the flavor or one another rule out."""
    model, flavor = job.model.name, job.model.flavor
    refuse(
        given_in(job),
        (*absent(model, flavor, "num_experts" in FLAVORS[model][flavor]), *wrong_sizes(model, sizes_of(job))),
    )


def check_model_layout(settings: Settings, has_gpus: bool) -> None:
    """Raise ConfigError for degrees of parallelism that the flavor of a model does not allow."""
    if (context := settings["parallelism.context_parallel_degree"]) > 1:
        raise ConfigError(
            f"parallelism.context_parallel_degree = {context} is not supported with TorchTitan 0.3: allowed is 1"
        )
    sizes = sizes_of(settings.values)
    facts = ModelFacts(
        n_layers=sizes["n_layers"],
        heads={"heads": sizes["n_heads"], "key-value heads": sizes.get("n_kv_heads")},
        experts=sizes.get("num_experts", 0),
        is_tied=sizes.get("enable_weight_tying", False),
        has_stages=True,
    )
    raise_first(layout_problems(settings, facts), settings)


def names_of_stages(*args) -> list[list[str]]:
    """TorchTitan's names of the modules of every stage, as 0.2.2 has them."""
    return [[*map(saved_name, stage)] for stage in _generate_llm_fqn_per_model_part(*args)]


def build_on_meta(job_config) -> nn.Module:
    """Return a job's model as TorchTitan builds it before converters, on the meta device."""
    spec = model_spec(job_config)
    parts = dict.fromkeys(("metrics", "tokenizer", "dataloader", "checkpoint", "validator"))
    spec.model.update_from_config(config=trainer_config(job_config, spec, parts))  # says what tensor parallelism splits
    with torch.device("meta"):
        return spec.model.build()


def try_plan(model: nn.Module, job_config) -> None:
    """Split the layers of a converted model on the meta device by the job's degree of tensor parallelism.

    Raises:
        ConfigError: training would refuse to split the model.
    """
    degrees = job_config.parallelism
    if (tensor := degrees.tensor_parallel_degree) == 1:
        return
    torch.distributed.init_process_group("fake", rank=0, world_size=tensor)
    try:
        split_layers(model, init_device_mesh("cpu", (tensor,)), degrees.expert_parallel_degree > 1)
    finally:
        torch.distributed.destroy_process_group()


def wandb_logger(folder, job_config) -> WandBLogger:
    """TorchTitan's logger for wandb, whose files are in ``folder``."""
    return WandBLogger(str(folder), job_config.to_dict())


def metrics_processor(job_config, parallel_dims) -> MetricsProcessor:
    """TorchTitan's metrics of a job, without its logger for wandb."""
    settings = same(MetricsProcessor.Config, job_config.metrics, enable_wandb=False)
    parallelism, folder = job_config.parallelism, job_config.job.dump_folder
    schedule = parallelism.pipeline_parallel_schedule
    return MetricsProcessor(settings, parallel_dims=parallel_dims, dump_folder=folder, pp_schedule=schedule)


def hugging_face_tokenizer(folder: str) -> HuggingFaceTokenizer:
    """The tokenizer in a folder."""
    return HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=folder)
