"""Shared by the tests of rows that travel to experts on other processes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode

from mxtrain import MXNorm
from mxtrain.nn.experts import QuantizedExperts
from tests.support.expert_checks import Experts
from tests.support.layer_checks import fill

TOKENS, DIM, HIDDEN, EXPERTS = 48, 64, 32, 4
CODES = DIM + DIM // 32
# Rows for each expert from each of two processes: uneven, an expert without rows, one process with most of the rows.
COUNTS = [(40, 0, 3, 37), (1, 0, 50, 9)]
CASES = [("reference", torch.float32), ("emulated", torch.bfloat16)]


class Routed(nn.Module):
    """A norm and its experts, for tokens whose experts are chosen."""

    def __init__(self, mode="reference", recipe="mxfp8", dtype=torch.float32):
        super().__init__()
        self.norm = MXNorm(DIM, recipe=recipe, mode=mode)
        self.norm.feeds_mixture = True
        experts = fill(Experts(DIM, HIDDEN, EXPERTS, dtype))
        self.experts = QuantizedExperts.from_experts(experts, recipe=recipe, mode=mode)
        self.experts.set_seed(0, "moe.experts")
        self.experts.fed_by = (self.norm,)

    def forward(self, x, index, counts):
        return self.experts(self.norm(x).view(-1, DIM)[index], counts)


class _Sent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.sent = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        rows = {torch.ops._c10d_functional.all_to_all_single.default: 0, torch.ops.c10d.alltoall_base_.default: 1}
        if func in rows and args[rows[func]].ndim == 2:
            sent = args[rows[func]]
            self.sent.append((len(sent), sent.shape[1] * sent.itemsize))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted() -> Iterator[list[tuple[int, int]]]:
    """Give a list to which every exchange of rows appends their number and the bytes of a row."""
    with _Sent() as mode:
        yield mode.sent
