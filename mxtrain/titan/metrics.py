"""What TorchTitan's trainer reports: ``metrics.jsonl`` and ``run.json``, progress, wandb, and the line about the model.

``build_metrics_processor`` returns TorchTitan's ``MetricsProcessor``, which computes loss, throughput and memory.
``metrics.jsonl``, the progress line and wandb are loggers of it, so they show the numbers of TensorBoard.
"""

import json
import math
import os
from datetime import datetime
from functools import partial
from pathlib import Path

import torch
from torchtitan.components.metrics import LoggerContainer, MetricsProcessor
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from mxtrain.analysis.loggers import (
    LOSS,
    TRAINING_KEYS,
    MetricsFileLogger,
    ProgressLogger,
    WandbLogger,
    earlier_wandb_run,
    overview,
    wandb_facts,
)
from mxtrain.checkpoints.folder import package_versions
from mxtrain.checkpoints.run_folder import FACTS_FILE, METRICS_FILE
from mxtrain.checkpoints.start import require_no_other_run, resumed_step
from mxtrain.checkpoints.terminal import go_on_without, note
from mxtrain.diagnostics.recording import Numerics
from mxtrain.errors import ConfigError, one_line
from mxtrain.files import replace_file
from mxtrain.rng.rounding import step_is_set
from mxtrain.settings.model_settings import given_in
from mxtrain.settings.mxnorm_section import diagnostics_every, quantizing_among, schedule_in
from mxtrain.titan.converters import active_settings
from mxtrain.titan.layouts import Stage
from mxtrain.titan.releases import engine


class Loggers(LoggerContainer):
    to_file: MetricsFileLogger | None = None
    to_wandb: WandbLogger | None = None
    knows_peak = True
    """Whether TorchTitan knows the device's peak; otherwise no logger gets TFLOP/s and MFU"""

    def log(self, metrics: dict, step: int) -> None:
        left_out = () if self.knows_peak else (TRAINING_KEYS["tflops"], TRAINING_KEYS["mfu"])
        metrics = {name: value for name, value in metrics.items() if name not in left_out}
        for one in self._loggers:
            one.log(metrics if one in (self.to_file, self.to_wandb) else overview(metrics), step)


def build_metrics_processor(job_config, parallel_dims, model_args=None) -> MetricsProcessor:
    """Build TorchTitan's ``MetricsProcessor`` with the loggers of the job config and mxtrain's own.

    Rank 0 also writes ``metrics.jsonl`` and ``run.json`` into ``job.dump_folder`` and shows progress, whatever loggers
    are enabled. The config of a wandb run receives ``run_facts``. If wandb cannot start, a warning is logged and
    training continues.
    """
    is_first = torch.distributed.get_rank() == 0
    wants_wandb = job_config.metrics.enable_wandb and (is_first or job_config.metrics.save_for_all_ranks)
    folder = Path(job_config.job.dump_folder)
    steps_done, earlier = 0, None
    if is_first:
        checkpoint = job_config.checkpoint
        if not step_is_set():  # -m torchtitan.train, which has not looked
            require_no_other_run(folder, checkpoint)
            require_plain_recipes(job_config)
        steps_done = resumed_step(folder, checkpoint)
        earlier = earlier_wandb_run(folder) if steps_done > 0 else None

    processor = engine().metrics_processor(job_config, parallel_dims)
    loggers = Loggers()
    peak = processor.gpu_peak_flops
    # TorchTitan 0.2.2 takes every device that it lacks for an A100.
    loggers.knows_peak = bool(peak) and not math.isnan(peak) and (peak != 312e12 or "A100" in _device())
    loggers.add_logger(processor.logger)  # TensorBoard's
    processor.logger = loggers
    facts = run_facts(job_config) if is_first or wants_wandb else {}
    if wants_wandb:
        _add_wandb(loggers, job_config, dict(facts), earlier)
    if is_first:
        facts["wandb"] = wandb_facts(loggers.to_wandb and loggers.to_wandb.run, folder)
        if loggers.to_wandb is not None:
            _tell_about_wandb(facts["wandb"], loggers.to_wandb.last_step, steps_done)
        if earlier and facts["wandb"]["id"] is None:
            facts["wandb"]["id"] = earlier[0]  # a later start may have wandb again
        with go_on_without(folder / FACTS_FILE):
            folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / FACTS_FILE, (json.dumps(facts, indent=2) + "\n").encode())
        loggers.to_file = MetricsFileLogger(folder / METRICS_FILE, steps_done)
        loggers.add_logger(loggers.to_file)
        loggers.add_logger(ProgressLogger(job_config.training.steps, facts["world_size"]))
    return processor


def require_plain_recipes(job_config) -> None:
    """Raise ConfigError for recipes that change, which TorchTitan's own trainer does not do."""
    if schedule_in(job_config):
        raise ConfigError("mxnorm.schedule needs mxtrain's trainer; train with -m mxtrain.train")


def _add_wandb(loggers: Loggers, job_config, facts: dict, earlier) -> None:
    section = job_config.metrics
    place = Path(job_config.job.dump_folder) / section.save_tb_folder / f"{datetime.now():%Y%m%d-%H%M}"
    if section.save_for_all_ranks:
        place /= f"rank_{torch.distributed.get_rank()}"
    try:
        start = partial(engine().wandb_logger, place, job_config)
        to_wandb = WandbLogger(start, job_config.to_dict(), facts, earlier)
    except Exception as error:  # wandb's, for wrong settings of wandb
        logger.warning(f"wandb did not start: {one_line(error)}; training goes on, and writes metrics.jsonl")
        return
    loggers.to_wandb = to_wandb
    loggers.add_logger(to_wandb)


def _tell_about_wandb(where: dict, last_step: int, steps_done: int) -> None:
    """Show where the wandb run is. It has ``last_step`` steps already, ``steps_done`` of which are not repeated."""
    if last_step > 0:
        logger.info(f"wandb run {where['id']} continues after step {last_step}")
    if last_step > steps_done:
        note(f"wandb keeps its values of steps {steps_done + 1} to {last_step}; those of this run are in metrics.jsonl")
    if where["mode"] == "offline":
        logger.info(f"wandb is offline; upload this run with: {where['sync']}")
    elif where["mode"] == "online":
        note(f"wandb run: {where['url']}")


def log_event(processor: MetricsProcessor, step: int, text: str) -> None:
    """Log what changes with ``step``, or ends the run after it, in a few words, to metrics.jsonl and wandb."""
    if isinstance(processor.logger, Loggers):  # a model of the user's may have another processor
        for one in filter(None, (processor.logger.to_file, processor.logger.to_wandb)):
            one.log_event(step, text)


def log_loss(processor: MetricsProcessor, step: int, loss: float, tokens_seen: int) -> None:
    """Write a row to metrics.jsonl with nothing but the loss of a step and the tokens of all ranks up to it."""
    if isinstance(processor.logger, Loggers) and processor.logger.to_file is not None:
        processor.logger.to_file.log({LOSS: loss, TRAINING_KEYS["tokens_seen"]: tokens_seen}, step)


def numerics_of(job_config, model_parts: list[torch.nn.Module]) -> Numerics | None:
    """Return what measures this job; None if its diagnostics are off, or if nothing is swapped."""
    settings, every = job_config.mxnorm.diagnostics, diagnostics_every(job_config.mxnorm)
    if every == 0 or not quantizing_among(job_config.model.converters):
        return None
    shapes, name_of = (lambda: Stage.finds_shapes), engine().saved_name
    return Numerics(every, settings.fqns, settings.tokens, model_parts, shapes, name_of)


def run_facts(job_config) -> dict:
    """Return the contents of ``run.json`` without ``wandb``: model, numerics, versions and device, all as JSON."""
    return {
        "name": os.path.basename(os.path.abspath(job_config.job.dump_folder)),
        "model": job_config.model.name,
        "flavor": job_config.model.flavor,
        **({"model_args": sizes} if (sizes := given_in(job_config)) else {}),
        "converters": list(job_config.model.converters),
        **active_settings(job_config),
        "precision": _precision(job_config),
        "versions": package_versions(),
        "device": _device(),
        "world_size": _world_size(),
    }


def describe_model(job_config, model: torch.nn.Module) -> str:
    """Return one line: the model's name, flavor and parameters, the device, the processes and the precision."""
    model_config, processes = job_config.model, _world_size()
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return (
        f"{model_config.name} {model_config.flavor}{' with [model_args]' if given_in(job_config) else ''}: "
        f"{parameters:,} parameters, {_device()}, "
        f"{processes} process{'es' if processes > 1 else ''}, {_precision(job_config)}"
    )


def _precision(job_config) -> str:
    training = job_config.training
    return f"{training.mixed_precision_param} compute, {training.dtype} parameters"


def _device() -> str:
    return utils.device_module.get_device_name(torch.device(utils.device_type))


def _world_size() -> int:
    return torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
