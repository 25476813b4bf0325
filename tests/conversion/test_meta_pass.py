"""A model that launches a Triton kernel of its own is not run into an illegal memory access by the survey."""

import pytest
import torch
import torch.nn as nn
import triton
import triton.language as tl

import mxtrain
from mxtrain.conversion.meta_pass import without_triton_launches


@triton.jit
def double(x_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets))


class Doubles(nn.Module):
    """Stands for TorchTitan's experts, whose grouped matrix product asks a Triton kernel for the order of tokens."""

    def forward(self, x):
        double[(1,)](x, n=32)
        return x


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(64)
        self.linear = nn.Linear(64, 64)
        self.norm2 = nn.RMSNorm(64)
        self.doubles = Doubles()

    def forward(self, x):
        return self.doubles(self.norm2(self.linear(self.norm1(x))))


def test_the_module_that_launches_is_not_followed():
    model = Model()
    report = mxtrain.convert(model, example_inputs=(torch.zeros(1, 32, 64),), filter_fqns=[])
    assert type(model.norm1).__name__ == "MXNorm"
    assert type(model.norm2) is nn.RMSNorm  # what the kernel does with its output is unknown
    assert "doubles, which fails on the meta device (RuntimeError: it launches a Triton kernel" in str(report)


def test_launches_are_as_before_afterwards():
    before = type(double).__getitem__
    with without_triton_launches():
        with pytest.raises(RuntimeError, match="no meta version"):
            double[(1,)](torch.zeros(32, device="meta"), n=32)
    assert type(double).__getitem__ is before
