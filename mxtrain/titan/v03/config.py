"""TorchTitan 0.3's config of a job, from settings with the names of 0.2.2."""

from collections.abc import Callable
from dataclasses import fields

from torchtitan.components.checkpointer import CheckpointManager
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer
from torchtitan.components.optimizer.optimizer import ParamGroupConfig
from torchtitan.components.tokenizer import BaseTokenizer
from torchtitan.components.validate import Validator
from torchtitan.config import Configurable
from torchtitan.config.configs import CommConfig, CompileConfig, DebugConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed.activation_checkpoint import FullAC, MemoryBudgetAC, SelectiveAC
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.tools.profiler import Profiler
from torchtitan.trainer import Trainer

from mxtrain.titan.muon import NAME
from mxtrain.titan.v03.muon import MuonConfig


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
        parts: functions that build "metrics", "tokenizer", "dataloader", "checkpoint" and "validator".
    """
    job, optimizer, stages = job_config.job, job_config.optimizer, job_config.parallelism.module_fqns_per_model_part
    is_muon = optimizer.name == NAME
    return Trainer.Config(
        model_spec=spec,
        hf_assets_path=job_config.model.hf_assets_path,
        dump_folder=job.dump_folder,
        profiler=same(Profiler.Config, job_config.profiling),
        metrics=same(built(MetricsProcessor.Config, parts["metrics"]), job_config.metrics),
        tokenizer=built(BaseTokenizer.Config, parts["tokenizer"])(),
        dataloader=built(Configurable.Config, parts["dataloader"])(),
        optimizer=(MuonConfig if is_muon else OptimizersContainer.Config)(
            implementation=optimizer.implementation,
            param_groups=[
                ParamGroupConfig(
                    pattern=".*",
                    optimizer_name="AdamW" if is_muon else optimizer.name,
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
