"""Fault: FSDP2 and tensor parallelism make two weights of a tied embedding and head. Mended in TorchTitan 0.3.0."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch
import torchtitan.models.llama3.infra.parallelize as llama3
import torchtitan.models.llama4.infra.parallelize as llama4
from torch.distributed.fsdp import fully_shard

from mxtrain.errors import ConfigError


@contextmanager
def shared_group(model: torch.nn.Module) -> Iterator[None]:
    """Context in which TorchTitan's parallelize functions shard embedding, last norm and head as one group, if tied.

    FSDP2 allows a weight in one group only. TorchTitan 0.2.2 puts the embedding and the head into two groups, which
    PyTorch refuses in the first step, its own tied Qwen3 included.
    """
    if not _is_tied(model):
        yield
        return

    def fully_shard_tied(module, **settings):
        if module is model.tok_embeddings:
            return module  # sharded with the head
        if module == [model.norm, model.output]:
            module = [model.tok_embeddings, *module]
        return fully_shard(module, **settings)

    # TorchTitan's other models take the function of llama4.
    with (
        patch.object(llama3, "fully_shard", fully_shard_tied),
        patch.object(llama4, "fully_shard", fully_shard_tied),
    ):
        yield


@contextmanager
def stays_tied(model: torch.nn.Module) -> Iterator[None]:
    """Context that ends with one weight for head and embedding, if they shared one before tensor parallelism split it.

    TorchTitan's plans give every process the same tokens of the vocabulary in both. Without this context, FSDP2 would
    gather and reduce two weights.
    """
    tied = _is_tied(model)
    yield
    if not tied:
        return
    parts = [getattr(module.weight, "placements", None) for module in (model.output, model.tok_embeddings)]
    if parts[0] != parts[1]:
        raise ConfigError(
            f"parallelism.tensor_parallel_degree splits a head with the embedding's weight into {parts[0]}, and the "
            f"embedding into {parts[1]}: allowed is 1, or model_args.enable_weight_tying = false"
        )
    model.output.weight = model.tok_embeddings.weight


def _is_tied(model: torch.nn.Module) -> bool:
    """Whether head and embedding share their weight. A stage of a pipeline has None in the place of one or both."""
    head, embedding = getattr(model, "output", None), getattr(model, "tok_embeddings", None)
    return head is not None and embedding is not None and head.weight is embedding.weight
