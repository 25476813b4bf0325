"""What the rest of mxtrain uses of TorchTitan 0.2.2."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import torch.nn as nn
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import JobConfig as JobConfig
from torchtitan.distributed.pipeline_parallel import generate_llm_fqn_per_model_part

from mxtrain.parallel.initial_weights import plain_name
from mxtrain.titan.v02.check_job import check_model_layout as check_model_layout
from mxtrain.titan.v02.check_job import check_names as check_names
from mxtrain.titan.v02.models.model_args import check_model_args as check_model_args
from mxtrain.titan.v02.models.model_args import vocab_size as vocab_size
from mxtrain.titan.v02.models.on_meta import build_on_meta as build_on_meta
from mxtrain.titan.v02.models.on_meta import example_inputs as example_inputs
from mxtrain.titan.v02.models.sized_model import SizedModel as SizedModel
from mxtrain.titan.v02.models.sized_model import multiply_experts_in_fp32 as multiply_experts_in_fp32
from mxtrain.titan.v02.parallelize import try_plan as try_plan
from mxtrain.titan.v02.trainer import Trainer as Trainer

hugging_face_tokenizer = HuggingFaceTokenizer
names_of_stages = generate_llm_fqn_per_model_part
saved_name = plain_name

GONE: dict[str, str] = {}
"""Settings of TorchTitan 0.2.2 that this release does not have"""
HEAD = "output"
"""The name of the output head in a model"""
FSDP_ON_ONE_PROCESS = False
"""Whether one process gathers weights, too"""


def convertible(model: nn.Module) -> nullcontext:
    """Context in which converters know the modules of ``model``."""
    return nullcontext()


def wandb_logger(folder, job_config) -> WandBLogger:
    """TorchTitan's logger for wandb, whose files are in ``folder``."""
    return WandBLogger(str(folder), job_config)


def metrics_processor(job_config, parallel_dims) -> MetricsProcessor:
    """TorchTitan's metrics of a job, without its logger for wandb."""
    others = copy.copy(job_config)
    others.metrics = replace(job_config.metrics, enable_wandb=False)
    processor = MetricsProcessor(others, parallel_dims)
    processor.job_config = job_config
    return processor
