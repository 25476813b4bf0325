"""TorchTitan's metrics, and beside them ``metrics.jsonl``, ``run.json`` and a wandb run that knows what was trained.

``build_metrics_processor`` returns TorchTitan's own ``MetricsProcessor``: loss, throughput and memory are what it
computes. ``metrics.jsonl`` is one more of its loggers, so it gets the same numbers as wandb and TensorBoard.
"""

import importlib.metadata
import json
import os
import platform
import time
from contextlib import nullcontext
from pathlib import Path

import torch
from torchtitan.components.metrics import (
    BaseLogger,
    LoggerContainer,
    MetricsProcessor,
    WandBLogger,
    _get_metrics_rank,
)
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

import mxtrain
from mxtrain.analysis.metrics_file import FILE_NAME, MetricsWriter
from mxtrain.analysis.runs import FACTS_FILE_NAME
from mxtrain.titan.converters import active_settings
from mxtrain.titan.wandb_run import wandb_defaults, wandb_facts

# Keys of a row of metrics.jsonl, and what TorchTitan 0.2.2 calls the same number.
TRAINING_KEYS = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "grad_norm": "grad_norm",
    "lr": "lr",
    "tokens_per_second": "throughput(tps)",
    "memory_gib": "memory/max_reserved(GiB)",
    "tokens_seen": "n_tokens_seen",
}
VALIDATION_KEYS = {"validation_loss": "validation_metrics/loss"}


class MetricsFileLogger(BaseLogger):
    """Writes what TorchTitan logs to ``metrics.jsonl``, in the format of ``mxtrain.analysis.metrics_file``."""

    def __init__(self, path: Path):
        self.writer = MetricsWriter(path)

    def log(self, metrics: dict, step: int) -> None:
        keys = VALIDATION_KEYS if VALIDATION_KEYS["validation_loss"] in metrics else TRAINING_KEYS
        row = {"step": step}
        row.update({key: float(metrics[source]) for key, source in keys.items() if source in metrics})
        if "tokens_seen" in row:
            row["tokens_seen"] = int(row["tokens_seen"])
        self.writer.write({**row, "time": time.time()})

    def close(self) -> None:
        self.writer.close()


def build_metrics_processor(job_config, parallel_dims, model_args=None, tag=None) -> MetricsProcessor:
    """Build TorchTitan's ``MetricsProcessor`` with the loggers of the job config, and ours.

    The process that TorchTitan chooses for metrics (rank 0, or the first of the last pipeline stage) also writes
    ``metrics.jsonl`` and ``run.json`` into ``job.dump_folder``, whatever loggers are enabled. A wandb run gets the
    facts of ``run_facts`` in its config. When wandb cannot start, that is logged and training goes on without it.
    """
    on_metrics_rank = torch.distributed.get_rank() == _get_metrics_rank(parallel_dims, job_config)
    wants_wandb = job_config.metrics.enable_wandb and (on_metrics_rank or job_config.metrics.save_for_all_ranks)
    folder = Path(job_config.job.dump_folder)

    with wandb_defaults(run_name=_run_name(job_config)) if wants_wandb else nullcontext():
        processor = MetricsProcessor(job_config, parallel_dims, tag)
    if not (on_metrics_rank or wants_wandb):
        return processor

    facts = run_facts(job_config)
    facts["wandb"] = _tell_wandb(processor.logger, facts, job_config) if wants_wandb else wandb_facts()
    if on_metrics_rank:
        _write_facts(folder / FACTS_FILE_NAME, facts)
        if not isinstance(processor.logger, LoggerContainer):
            processor.logger = LoggerContainer()
        processor.logger.add_logger(MetricsFileLogger(folder / FILE_NAME))
    return processor


def _tell_wandb(loggers: LoggerContainer, facts: dict, job_config) -> dict:
    """Put ``facts`` into the config of the wandb run among ``loggers``, and say where that run is."""
    run = next((one.wandb.run for one in loggers._loggers if isinstance(one, WandBLogger)), None)
    if run is None:
        logger.warning("wandb did not start: training goes on without it, its metrics are in metrics.jsonl")
        return wandb_facts()
    sections = job_config.to_dict()  # TorchTitan has put these into the config: their names are taken
    run.config.update({key: value for key, value in facts.items() if key not in sections})
    where = wandb_facts(run)
    if where["mode"] == "offline":
        logger.info(f"wandb is offline; upload this run with: {where['sync']}")
    elif where["mode"] == "online":
        logger.info(f"wandb run: {where['url']}")
    return where


def run_facts(job_config) -> dict:
    """What was trained, with what: the contents of ``run.json`` but for ``wandb``. Everything in it is JSON."""
    device = torch.device(utils.device_type)
    training = job_config.training
    return {
        "name": _run_name(job_config),
        "model": job_config.model.name,
        "flavor": job_config.model.flavor,
        "converters": list(job_config.model.converters),
        **active_settings(job_config),
        "precision": f"{training.mixed_precision_param} compute, {training.dtype} parameters",
        "versions": {
            "mxtrain": mxtrain.__version__,
            "python": platform.python_version(),
            **{package: _version(package) for package in ("torch", "torchtitan", "torchao", "triton")},
        },
        "device": utils.device_module.get_device_name(device),
        "world_size": torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1,
    }


def _run_name(job_config) -> str:
    return os.path.basename(os.path.abspath(job_config.job.dump_folder))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _write_facts(path: Path, facts: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    replacement = path.with_name(path.name + ".tmp")
    replacement.write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    replacement.replace(path)
