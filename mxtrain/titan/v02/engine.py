"""What the rest of mxtrain uses of TorchTitan 0.2.2."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import torch.nn as nn
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.tokenizer import HuggingFaceTokenizer as hugging_face_tokenizer
from torchtitan.config import JobConfig
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part as names_of_stages

from mxtrain.parallel.initial_weights import plain_name as saved_name
from mxtrain.titan.v02.check_job import check_model_layout, check_names
from mxtrain.titan.v02.models.model_args import check_model_args, vocab_size
from mxtrain.titan.v02.models.on_meta import build_on_meta, example_inputs
from mxtrain.titan.v02.models.sized_model import SizedModel, multiply_experts_in_fp32
from mxtrain.titan.v02.parallelize import try_plan
from mxtrain.titan.v02.trainer import Trainer

__all__ = [
    "FSDP_ON_ONE_PROCESS",
    "HEAD",
    "JobConfig",
    "SizedModel",
    "Trainer",
    "build_on_meta",
    "check_model_args",
    "check_model_layout",
    "check_names",
    "convertible",
    "example_inputs",
    "hugging_face_tokenizer",
    "metrics_processor",
    "multiply_experts_in_fp32",
    "names_of_stages",
    "saved_name",
    "try_plan",
    "vocab_size",
]

HEAD = "output"
"""The name of the output head in a model"""
FSDP_ON_ONE_PROCESS = False
"""Whether one process gathers weights, too"""


def convertible(model: nn.Module) -> nullcontext:
    """Context in which converters know the modules of ``model``."""
    return nullcontext()


def metrics_processor(job_config, parallel_dims, tag: str | None) -> MetricsProcessor:
    """TorchTitan's metrics of a job, without its logger for wandb."""
    others = copy.copy(job_config)
    others.metrics = replace(job_config.metrics, enable_wandb=False)
    processor = MetricsProcessor(others, parallel_dims, tag)
    processor.job_config = job_config
    return processor
