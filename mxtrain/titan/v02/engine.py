"""What the rest of mxtrain uses of TorchTitan 0.2.2."""

import copy
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from unittest.mock import patch

import torch
import torch.nn as nn
import torchtitan.train as titan
from torch.nn.attention.flex_attention import create_block_mask
from torchtitan.components.metrics import MetricsProcessor, WandBLogger
from torchtitan.components.tokenizer import HuggingFaceTokenizer
from torchtitan.config import TORCH_DTYPE_MAP, JobConfig
from torchtitan.models import _supported_models
from torchtitan.models.attention import VarlenMetadata
from torchtitan.protocols import model_converter, train_spec
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools import utils

from mxtrain.checkpoints.checkpointer import Checkpointer
from mxtrain.nn.experts import kept_buffers
from mxtrain.parallel.initial_weights import plain_name
from mxtrain.titan.training_run import TrainingRun
from mxtrain.titan.v02.models import is_tied, sizes_in
from mxtrain.titan.v02.models import layout_problems as layout_problems
from mxtrain.titan.v02.models import sizes_of as sizes_of
from mxtrain.titan.v02.parallelize import Layout
from mxtrain.titan.v02.train_specs import register as register
from mxtrain.titan.v02.train_specs import with_mxtrain as with_mxtrain

hugging_face_tokenizer = HuggingFaceTokenizer
saved_name = plain_name


def convertible(model: nn.Module) -> nullcontext:
    return nullcontext()


def models() -> list[str]:
    return sorted(_supported_models - {"flux"} | train_spec._extra_train_specs.keys())  # flux has its own trainer


def converters() -> Iterable[str]:
    return model_converter._registry_model_converter_cls


def wandb_logger(folder, job_config) -> WandBLogger:
    return WandBLogger(str(folder), job_config)


def metrics_processor(job_config, parallel_dims) -> MetricsProcessor:
    metrics = replace(job_config.metrics, enable_wandb=False)
    processor = MetricsProcessor(replace(job_config, metrics=metrics), parallel_dims)
    processor.job_config = job_config
    return processor


def build_on_meta(job_config) -> nn.Module:
    spec = get_train_spec(job_config.model.name)
    args = spec.model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    with torch.device("meta"), utils.set_default_dtype(TORCH_DTYPE_MAP[job_config.training.dtype]):
        return spec.model_cls(args)


def example_inputs(model: nn.Module) -> tuple:
    tokens = torch.zeros(1, 32, dtype=torch.long)
    attn_type = getattr(getattr(model, "model_args", None), "attn_type", "sdpa")
    if attn_type == "flex":
        causal = create_block_mask(lambda b, h, q, k: q >= k, None, None, 32, 32, device="cpu")
        return tokens, causal
    if attn_type == "varlen":
        offsets = torch.tensor([0, 32], dtype=torch.int32)
        return tokens, VarlenMetadata(offsets, offsets, 32, 32)
    return (tokens,)


@dataclass(frozen=True)
class SizedModel:
    """See ``Engine``. ``args`` are TorchTitan's model arguments."""

    name: str
    args: object

    def __post_init__(self):
        if getattr(self.args, "attn_type", "sdpa") != "sdpa":
            self.args.attn_type, self.args.attn_mask_type = "sdpa", "causal"
        vars(self.args).setdefault("moe_impl", "standard")  # no field: a job's settings add it

    @staticmethod
    def flavors(name: str) -> list[str]:
        return list(get_train_spec(name).model_args)

    @classmethod
    def of_flavor(
        cls, name: str, flavor: str, given: Mapping[str, object] = {}, vocab_size: int = 0, seq_len: int = 2048
    ) -> "SizedModel":
        args = get_train_spec(name).model_args[flavor]  # a copy
        args.set_model_args(given)
        args.vocab_size, args.max_seq_len = vocab_size or args.vocab_size, seq_len
        return cls(name, args)

    @classmethod
    def of_job(cls, job_config) -> "SizedModel":
        args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
        args.update_from_config(job_config)
        return cls(job_config.model.name, args)

    @property
    def sizes(self) -> dict[str, object]:
        return {**sizes_in(self.name, self.args), "seq_len": self.args.max_seq_len}

    def on_meta(self) -> nn.Module:
        with torch.device("meta"):
            return get_train_spec(self.name).model_cls(copy.deepcopy(self.args))

    def adapter(self):
        # That of a tied model would want both weights at once.
        args = replace(self.args, enable_weight_tying=False) if is_tied(self.args) else self.args
        return get_train_spec(self.name).state_dict_adapter(args, None)


class Trainer(TrainingRun, titan.Trainer):
    """TorchTitan's trainer with what ``TrainingRun`` adds, and right gradients of replicas and pipelines."""

    def _build(self) -> None:
        own = {"CheckpointManager": partial(Checkpointer, self), "ParallelDims": Layout}
        own["ensure_pp_loss_visible"] = lambda *args: None  # which warns that rank 0 does not know it
        with (
            patch.multiple(titan, **own),
            patch.object(type(self.job_config), "maybe_log", JobConfig.maybe_log, create=True),
        ):
            titan.Trainer.__init__(self, self.job_config)
        self.metrics_processor.log = partial(self._log_right_maximum, self.metrics_processor.log)
        if self.job_config.validation.enable:
            # Tokens of a validation would count for the next step's load balance of experts.
            self.validator.validate = kept_buffers(self.model_parts)(self.validator.validate)

    def batch_generator(self, data_iterable):
        """Yield batches, and count the tokens of this rank.

        Fault: context parallelism counts the tokens of a sequence on every rank. Mended in TorchTitan 0.3.0. All ranks
        of a context-parallel group read the same sequences, and each computes a part of every sequence. TorchTitan
        counts whole sequences on every rank where it adds up the ranks' counts, or divides a part's loss by the tokens
        of whole sequences. Texts have no tokens without a label, so all parts have the same number of tokens.
        """
        for inputs, labels in super().batch_generator(data_iterable):
            self.ntokens_seen -= labels.numel() - labels.numel() // self.parallel_dims.cp
            yield inputs, labels

    def _log_right_maximum(self, log, step, global_avg_loss, global_max_loss, *args, **kwargs) -> None:
        """Log, and take the largest loss for that of a part, divided by the tokens of whole sequences."""
        log(step, global_avg_loss, global_max_loss * self.parallel_dims.cp, *args, **kwargs)

    def _forward_and_backward(self, *, global_valid_tokens, **kwargs) -> torch.Tensor:
        if self.parallel_dims.pp_enabled:
            with self.pp_schedule.loss_fn.divided_by(global_valid_tokens):
                return super()._forward_and_backward(global_valid_tokens=1.0, **kwargs)
        return super()._forward_and_backward(global_valid_tokens=global_valid_tokens, **kwargs)
