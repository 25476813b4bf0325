"""Jobs on small texts, and the validators and batches of their tests."""

import random
from contextlib import nullcontext
from copy import deepcopy
from functools import cache, reduce

import torch
from torch import nn
from torchtitan.config import ConfigManager
from torchtitan.distributed import ParallelDims

from mxtrain.titan.data import build_tokenizer
from mxtrain.titan.v02.validator import build_validator

VOCABULARY = 300


def text(seed: int, words: int = 300) -> str:
    generator = random.Random(seed)
    return " ".join("".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(words))


@cache
def _parsed():
    return ConfigManager().parse_args(["--job.custom_config_module=mxtrain.titan.job_config", "--model.name=llama3"])


SMALL = (
    "--model.flavor=debugmodel",
    f"--data.vocab_size={VOCABULARY}",
    "--data.validation_share=0.3",
    *(f"--{section}.{size}" for section in ("training", "validation") for size in ("seq_len=16", "local_batch_size=4")),
)


def job(*flags):
    """A small job config with these flags. TorchTitan parses its flags in half a second, so only the defaults."""
    config = deepcopy(_parsed())
    for flag in (*SMALL, *flags):
        name, _, value = flag.removeprefix("--").partition("=")
        *sections, field = name.split(".")
        section = reduce(getattr, sections, config)
        kind = type(getattr(section, field))
        as_kind = {bool: lambda text: text in ("", "True"), list: lambda text: text.split(","), type(None): str}
        setattr(section, field, as_kind.get(kind, kind)(value))
    return config


def take(loader, count):
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def same(one, two) -> bool:
    return all(
        torch.equal(a[0]["input"], b[0]["input"]) and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True)
    )


class Bigrams(nn.Sequential):
    """The smallest model: the next token's logits from this token."""

    def get_attention_masks(self, **inputs):
        raise TypeError("none needed")  # what TorchTitan's models do then


class Recorder:
    """Stands in for the metrics processor."""

    def __init__(self):
        self.ntokens_since_last_log = 0
        self.losses = []

    def log_validation(self, loss, step):
        self.losses.append(loss)


def validator(config, dp_world_size=1, dp_rank=0):
    return build_validator(
        job_config=config,
        dp_world_size=dp_world_size,
        dp_rank=dp_rank,
        tokenizer=build_tokenizer(config),
        parallel_dims=ParallelDims(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1),
        loss_fn=lambda output, labels: nn.functional.cross_entropy(
            output.flatten(0, 1), labels.flatten(), reduction="sum"
        ),
        validation_context=nullcontext,
        maybe_enable_amp=nullcontext(),
        metrics_processor=Recorder(),
        pp_schedule=None,
        pp_has_first_stage=None,
        pp_has_last_stage=None,
    )


def rows_of(loader) -> list[tuple]:
    return [
        (*row.tolist(), label[-1].item())
        for inputs, labels in loader
        for row, label in zip(inputs["input"], labels, strict=True)
    ]
