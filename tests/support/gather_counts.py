"""Counts what norms gather: bytes of the results of all-gathers, at dispatch.

``python scripts/bench/gathers.py`` prints the table in train_configs/LAYOUTS.md with it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mxtrain.formats.collectives import GATHER_PARTS
from mxtrain.nn.split import SplitSequences, by_output_features

GATHERS = (torch.ops._c10d_functional.all_gather_into_tensor.default, GATHER_PARTS)


def bytes_of(results: torch.Tensor | list[torch.Tensor]) -> int:
    tensors = results if isinstance(results, list | tuple) else [results]
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors)


class _Counter(TorchDispatchMode):
    def __init__(self, counts: list[int]):
        super().__init__()
        self.counts = counts

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        if func in GATHERS:
            self.counts.append(bytes_of(results))
        return results


@contextmanager
def counted() -> Iterator[list[int]]:
    """Give a list to which every all-gather appends the bytes of its results. Eager code only."""
    counts = []
    with _Counter(counts):
        yield counts


def split_block(block: nn.Module, mesh, gather: str, forwards: int = 1) -> None:
    """Split a ``NormBlock`` over a mesh as TorchTitan's plans do: sequences of the norm, outputs of its linears."""
    group = mesh.get_group().group_name
    block.norm.weight = nn.Parameter(distribute_tensor(block.norm.weight.detach(), mesh, [Replicate()]))
    block.norm.split = SplitSequences(group, mesh.size(), mesh.get_local_rank(), gather, forwards)
    for linear in block.linears:
        linear.weight = nn.Parameter(distribute_tensor(linear.weight.detach(), mesh, [Shard(0)]))
        if linear.bias is not None:
            linear.bias = nn.Parameter(distribute_tensor(linear.bias.detach(), mesh, [Shard(0)]))
        linear.split = by_output_features(group)
