"""What the rest of mxtrain uses of TorchTitan 0.3."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.distributed.pipeline_parallel import _generate_llm_fqn_per_model_part
from torchtitan.models.common.moe import GroupedExperts

from mxtrain.conversion.converters import CONVERTERS
from mxtrain.data.config import DATASETS
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.settings.fields import Settings, raise_first
from mxtrain.settings.model_settings import absent, given_in, refuse, wrong_sizes
from mxtrain.settings.read import import_own
from mxtrain.titan.check_job import ModelFacts, layout_problems
from mxtrain.titan.data import check_datasets, validation_dataset
from mxtrain.titan.v03.config import same, trainer_config
from mxtrain.titan.v03.models import DEFAULTS, FLAVORS, adapter_of, config_of, model_spec, sizes_of
from mxtrain.titan.v03.names import name_in_022 as saved_name
from mxtrain.titan.v03.parallelize import convertible as convertible
from mxtrain.titan.v03.parallelize import split_layers
from mxtrain.titan.v03.trainer import Trainer as Trainer
from mxtrain.titan.v03.with_mxtrain import with_mxtrain as with_mxtrain

FSDP_ON_ONE_PROCESS = True


def example_inputs(model: nn.Module) -> tuple:
    return (torch.zeros(1, 32, dtype=torch.long),)


def vocab_size(job_config) -> int:
    require_one_of("model.flavor", job_config.model.flavor, FLAVORS[job_config.model.name])
    return sizes_of(job_config)["vocab_size"]


def check_names(job) -> None:
    """Raise ConfigError for a model, flavor or converter that nobody has registered."""
    if own := job.experimental.custom_import:
        import_own("experimental.custom_import", own)
    require_one_of("model.name", job.model.name, FLAVORS)
    require_one_of("model.flavor", job.model.flavor, FLAVORS[job.model.name])
    for name in job.model.converters:
        require_one_of("model.converters", name, CONVERTERS)
    check_datasets(job)
    if job.validation.enable:  # whose text mxtrain's loaders read
        require_one_of("validation.dataset", validation_dataset(job), DATASETS)


def check_model_args(job) -> None:
    model, flavor = job.model.name, job.model.flavor
    refuse(
        given_in(job),
        (*absent(model, flavor, "num_experts" in FLAVORS[model][flavor]), *wrong_sizes(model, sizes_of(job))),
    )


def check_model_layout(settings: Settings, has_gpus: bool) -> None:
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
    return [[*map(saved_name, stage)] for stage in _generate_llm_fqn_per_model_part(*args)]


def build_on_meta(job_config) -> nn.Module:
    spec = model_spec(job_config)
    parts = dict.fromkeys(("metrics", "tokenizer", "dataloader", "checkpoint", "validator"))
    spec.model.update_from_config(config=trainer_config(job_config, spec, parts))  # says what tensor parallelism splits
    with torch.device("meta"):
        return spec.model.build()


def try_plan(model: nn.Module, job_config) -> None:
    degrees = job_config.parallelism
    if (tensor := degrees.tensor_parallel_degree) == 1:
        return
    torch.distributed.init_process_group("fake", rank=0, world_size=tensor)
    try:
        split_layers(model, init_device_mesh("cpu", (tensor,)), degrees.expert_parallel_degree > 1)
    finally:
        torch.distributed.destroy_process_group()


def wandb_logger(folder, job_config) -> WandBLogger:
    return WandBLogger(str(folder), job_config.to_dict())


def metrics_processor(job_config, parallel_dims) -> MetricsProcessor:
    settings = same(MetricsProcessor.Config, job_config.metrics, enable_wandb=False)
    parallelism, folder = job_config.parallelism, job_config.job.dump_folder
    schedule = parallelism.pipeline_parallel_schedule
    return MetricsProcessor(settings, parallel_dims=parallel_dims, dump_folder=folder, pp_schedule=schedule)


def hugging_face_tokenizer(folder: str) -> HuggingFaceTokenizer:
    return HuggingFaceTokenizer(HuggingFaceTokenizer.Config(), tokenizer_path=folder)


_all_to_all = dist.all_to_all


def register() -> None:
    """Let expert parallelism exchange rows on a CPU, where every process sends others different numbers of them."""
    if not torch.cuda.is_available():
        dist.all_to_all = all_to_all


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group=None, async_op: bool = False):
    """As ``torch.distributed.all_to_all``, for tensors [R, ...], on gloo as well, which takes equal shapes only."""
    if dist.get_backend(group) != "gloo":
        return _all_to_all(outputs, inputs, group, async_op)
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), [*map(len, outputs)], [*map(len, inputs)], group)
    for output, part in zip(outputs, received.split([*map(len, outputs)])):
        output.copy_(part)


class _ExpertsInFP32(GroupedExperts):
    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        pass

    def forward(self, x_RD: torch.Tensor, num_tokens_per_expert_E: torch.Tensor) -> torch.Tensor:
        y_RD, start = torch.zeros_like(x_RD), 0
        for count, w1, w2, w3 in zip(num_tokens_per_expert_E.tolist(), self.w1_EFD, self.w2_EDF, self.w3_EFD):
            x, end = x_RD[start : start + int(count)], start + int(count)
            y_RD[start:end] = F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
            start = end
        return y_RD


@dataclass(frozen=True)
class SizedModel:
    """A model with causal attention and without data.

    Attributes:
        name: TorchTitan's.
        sizes: by their names in ``[model_args]``, "vocab_size" and "seq_len"; "num_experts" only if it has any.
    """

    name: str
    sizes: dict[str, object]

    @staticmethod
    def flavors(name: str) -> list[str]:
        """The flavors of a model."""
        return list(FLAVORS.get(name, ()))

    @classmethod
    def of_flavor(cls, name: str, flavor: str, given: Mapping[str, object] = {}, vocab_size: int = 0) -> "SizedModel":
        """A flavor with settings of ``[model_args]``, and another vocabulary if it is not 0."""
        sizes = {"seq_len": 2048, **DEFAULTS[name], **FLAVORS[name][flavor], **given}
        return cls(name, sizes | ({"vocab_size": vocab_size} if vocab_size else {}))

    @classmethod
    def of_job(cls, job_config) -> "SizedModel":
        """The model of a job."""
        return cls(job_config.model.name, sizes_of(job_config))

    def shortened(self, n_layers: int, seq_len: int) -> "SizedModel":
        """The same model with so many layers and positions."""
        return replace(self, sizes={**self.sizes, "n_layers": n_layers, "seq_len": seq_len})

    def on_meta(self, experts_in_fp32: bool = False) -> nn.Module:
        """The model without converters on the meta device, fp32.

        TorchTitan's grouped product of experts rounds to bf16. With ``experts_in_fp32`` they are multiplied one by one.
        """
        model = config_of(self.name, self.sizes)
        for _, experts, parent, name in model.traverse(GroupedExperts.Config) if experts_in_fp32 else ():
            setattr(parent, name, same(_ExpertsInFP32.Config, experts))
        with torch.device("meta"):
            return model.build()

    def adapter(self):
        """TorchTitan's adapter, for one parameter at a time."""
        return adapter_of(self.name)(config_of(self.name, self.sizes), None)

    def unlike_transformers(self) -> Iterator[str]:
        """What transformers do not compute: nothing that sizes can set."""
        return iter(())
