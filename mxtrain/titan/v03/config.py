"""TorchTitan 0.3's config of a job, from settings with the names of 0.2.2."""

from collections.abc import Callable
from dataclasses import asdict, field, fields, make_dataclass

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.dataloader import BaseDataLoader
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config.configs import (
    CommConfig,
    CompileConfig,
    DebugConfig,
    ParallelismConfig,
    TrainingConfig,
)
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from mxtrain.errors import ConfigError
from mxtrain.settings.titan import TITAN

GONE = {
    "parallelism.expert_tensor_parallel_degree": "experts are split by parallelism.expert_parallel_degree alone",
    "parallelism.disable_loss_parallel": "the loss of tensor parallelism is always parallel",
    "parallelism.context_parallel_rotate_method": "keys and values are always gathered",
    "parallelism.pipeline_parallel_expert_parallel_overlap": "schedules that overlap experts are not used",
    "optimizer.early_step_in_backward": "the optimizer steps after the backward",
    "activation_checkpoint.early_stop": "a layer is always computed again as a whole",
    "model.print_after_conversion": "conversion.txt in the run's folder says what was converted",
    "checkpoint.enable_ft_dataloader_checkpoints": "torchft has a trainer of its own, which mxtrain does not use",
    "job.save_config_file": "config.toml in the run's folder has all settings",
    "experimental.custom_args_module": "job.custom_config_module declares settings",
}
GONE_SECTIONS = {
    "fault_tolerance": "torchft has a trainer of its own, which mxtrain does not use",
    "memory_estimation": "mxtrain doctor --model estimates memory",
    "quantize": "model.converters names mxtrain's converters",
    "validation.dataloader": "training.dataloader holds for validation, too",
}
"""Settings, and tables of settings, of 0.2.2 that 0.3 does not have -> what takes their place"""


class _Table:
    def to_dict(self) -> dict:
        return asdict(self)


def _table(names: dict[str, tuple], kind: str) -> type:
    """A dataclass with a field for every name, and one for every table of names with dots."""
    tables, own = {}, []
    for name, (of_type, default) in names.items():
        table, dot, rest = name.partition(".")
        if dot:
            tables.setdefault(table, {})[rest] = (of_type, default)
        else:
            copied = isinstance(default, list)
            given = field(default_factory=lambda default=default: list(default)) if copied else field(default=default)
            own.append((name, of_type, given))
    for table, nested in tables.items():
        section = _table(nested, table)
        own.append((table, section, field(default_factory=section)))
    return make_dataclass(kind, own, bases=(_Table,))


JobConfig = _table(TITAN, "JobConfig")
"""A job's settings as attributes, as in TorchTitan 0.2.2: job_config.training.steps"""


def refuse_gone(job_config) -> None:
    """Raise ConfigError for a setting of 0.2.2 that is set to what 0.3 does not have."""
    for name, (_, default) in TITAN.items():
        value = job_config
        for part in name.split("."):
            value = getattr(value, part)
        table = next((table for table in GONE_SECTIONS if name.startswith(f"{table}.")), None)
        instead = GONE.get(name) or GONE_SECTIONS.get(table)
        if instead and value != default:
            raise ConfigError(f"{name} = {value!r} is not a setting of TorchTitan 0.3: {instead}")
    option = job_config.activation_checkpoint.selective_ac_option
    if option not in ("op", TITAN["activation_checkpoint.selective_ac_option"][1]):
        raise ConfigError(
            f"activation_checkpoint.selective_ac_option = {option!r} is for layers, and TorchTitan 0.3 chooses "
            "operations in every layer: allowed is 'op'"
        )


def built(kind: type, build: Callable) -> type:
    """A config class like ``kind`` whose component is what ``build`` returns."""
    return type("Config", (kind,), {"build": staticmethod(build)})


def same(kind: type, section, **others):
    """A config of class ``kind`` with the values of the same names in a table of settings."""
    same = {f.name: getattr(section, f.name) for f in fields(kind) if hasattr(section, f.name)}
    return kind(**{**same, **others})


def trainer_config(job_config, spec: ModelSpec, parts: dict[str, Callable]) -> Trainer.Config:
    """Return TorchTitan's config of a job.

    Args:
        spec: of the model.
        parts: functions that build "metrics", "tokenizer", "dataloader", "checkpoint" and "validator".
    """
    job, optimizer, stages = job_config.job, job_config.optimizer, job_config.parallelism.module_fqns_per_model_part
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=job_config.model.hf_assets_path,
        dump_folder=job.dump_folder,
        profiler=same(Profiler.Config, job_config.profiling),
        metrics=same(built(MetricsProcessor.Config, parts["metrics"]), job_config.metrics),
        tokenizer=built(BaseTokenizer.Config, parts["tokenizer"])(),
        dataloader=built(BaseDataLoader.Config, parts["dataloader"])(),
        optimizer=OptimizersContainer.Config(
            implementation=optimizer.implementation,
            param_groups=[
                ParamGroupConfig(
                    pattern=".*",
                    optimizer_name=optimizer.name,
                    optimizer_kwargs={
                        "lr": optimizer.lr,
                        "betas": (optimizer.beta1, optimizer.beta2),
                        "eps": optimizer.eps,
                        "weight_decay": optimizer.weight_decay,
                    },
                )
            ],
        ),
        lr_scheduler=same(LRSchedulersContainer.Config, job_config.lr_scheduler),
        training=same(TrainingConfig, job_config.training, disable_cuda_graphs=True),
        parallelism=same(
            ParallelismConfig,
            job_config.parallelism,
            module_fqns_per_model_part=stages
            and [["lm_head" if name == "output" else name for name in stage] for stage in stages],
        ),
        checkpoint=same(
            built(CheckpointManager.Config, parts["checkpoint"]),
            job_config.checkpoint,
            initial_load_model_only=bool(job_config.checkpoint.initial_load_path),  # else a warning; not read there
        ),
        activation_checkpoint=_activation_checkpoint(job_config.activation_checkpoint),
        compile=same(
            CompileConfig,
            job_config.compile,
            enable_async_tensor_parallel=job_config.parallelism.enable_async_tensor_parallel,
        ),
        comm=same(CommConfig, job_config.comm),
        validator=same(built(Validator.Config, parts["validator"]), job_config.validation, dataloader=None),
        debug=same(DebugConfig, job_config.debug, print_config=job.print_config, enable_structured_logging=False),
        loss=CrossEntropyLoss.Config(global_vocab_size=spec.model.vocab_size),
    )


def _activation_checkpoint(section):
    kinds = {"full": FullAC, "selective": SelectiveAC, "memory_budget": MemoryBudgetAC}
    if section.mode == "none":
        return None
    names = {"force_recompute_mm_shapes_by_fqns": section.per_op_sac_force_recompute_mm_shapes_by_fqns}
    own = names if section.mode == "selective" else {}
    return same(kinds[section.mode].Config, section, **own)
