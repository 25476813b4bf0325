"""Jobs on small texts, and the batches of their tests."""

import random

import torch

from mxtrain.settings.fields import Settings
from mxtrain.settings.read import flag_values
from mxtrain.settings.titan import known_fields
from mxtrain.titan.data import build_tokenizer, build_validation_loader

VOCABULARY = 300


def text(seed: int, words: int = 300) -> str:
    generator = random.Random(seed)
    return " ".join("".join(generator.choices("abcdefgh", k=generator.randint(2, 6))) for _ in range(words))


SMALL = (
    "--model.flavor=debugmodel",
    f"--data.vocab_size={VOCABULARY}",
    "--data.validation_share=0.3",
    *(f"--{section}.{size}" for section in ("training", "validation") for size in ("seq_len=16", "local_batch_size=4")),
)


def job(*flags):
    """A small job config with these flags, whose values alone are checked."""
    words = ["--model.name=llama3", "--model.converters=", *SMALL, *flags]
    return Settings(known_fields(), flag_values(words, known_fields())).values


def files_job(corpus, *flags):
    return job("--training.dataset=files", f"--training.dataset_path={corpus}", *flags)


def take(loader, count):
    batches = iter(loader)
    return [next(batches) for _ in range(count)]


def same(one, two) -> bool:
    return all(
        torch.equal(a[0]["input"], b[0]["input"]) and torch.equal(a[1], b[1]) for a, b in zip(one, two, strict=True)
    )


def validation_loader(config, dp_world_size=1, dp_rank=0):
    return build_validation_loader(config, build_tokenizer(config), (dp_rank, dp_world_size))


def rows_of(loader) -> list[tuple]:
    return [
        (*row.tolist(), label[-1].item())
        for inputs, labels in loader
        for row, label in zip(inputs["input"], labels, strict=True)
    ]
