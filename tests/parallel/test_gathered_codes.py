"""What FSDP sends, and would send as codes: the table in train_configs/LAYOUTS.md."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.models.llama3.model.model import Transformer

from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.nvfp4 import NVFP4

LAYOUTS = Path(__file__).parents[2] / "train_configs" / "LAYOUTS.md"
GATHERED, REDUCED = 2, 4
"""Bytes per element that FSDP gathers, in bf16, and reduces, in fp32"""


def model(flavor: str) -> Transformer:
    with torch.device("meta"):
        return Transformer(llama3_args[flavor])


def elements(transformer: Transformer) -> tuple[int, int, int]:
    """Elements of the blocks' linears, of other weights that are gathered twice, and of those gathered once."""
    linears = sum(weight.numel() for weight in transformer.layers.parameters() if weight.ndim == 2)
    once = transformer.output.weight.numel() + transformer.norm.weight.numel()
    return linears, sum(weight.numel() for weight in transformer.parameters()) - linears - once, once


def bytes_of_step(transformer: Transformer, bytes_per_element: float) -> float:
    """Bytes that FSDP sends in a step, if it gathers the blocks' linears with so many bytes per element."""
    linears, twice, once = elements(transformer)
    gathered = 2 * bytes_per_element * linears + GATHERED * (2 * twice + once)
    return gathered + REDUCED * (linears + twice + once)


@pytest.fixture
def four_processes():
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (4,))
    dist.destroy_process_group()


class Sent(TorchDispatchMode):
    """Counts the bytes of the whole tensors that collectives gather or reduce."""

    bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "c10d":
            self.bytes += max(each.nbytes for each in tree_leaves(args) if isinstance(each, torch.Tensor))
        return op(*args, **(kwargs or {}))


def test_fsdp_gathers_blocks_twice_in_bf16_and_reduces_in_fp32(four_processes):
    transformer = model("debugmodel")
    expected = bytes_of_step(transformer, GATHERED)
    apply_fsdp(transformer, four_processes, torch.bfloat16, torch.float32, pp_enabled=False)
    transformer.to_empty(device="cpu")
    transformer.freqs_cis = transformer._precompute_freqs_cis()
    with Sent() as sent:
        transformer(torch.zeros(1, 8, dtype=torch.int64)).sum().backward()
    assert sent.bytes == expected


@pytest.mark.parametrize("flavor", ["8B", "70B"])
def test_the_table(flavor):
    transformer = model(flavor)
    bf16, mxfp8, nvfp4 = (bytes_of_step(transformer, b) for b in (2, MXFP8.bytes_per_element, NVFP4.bytes_per_element))
    row = " | ".join([f"{bf16 / 2**30:.1f}", *(f"{sent / 2**30:.1f} ({sent / bf16:.2f})" for sent in (mxfp8, nvfp4))])
    assert f"| {flavor} | {row} |" in LAYOUTS.read_text()
    fewest_rows = min(weight.shape[0] for weight in transformer.layers.parameters() if weight.ndim == 2)
    assert (fewest_rows // MXFP8.block_size, fewest_rows // NVFP4.block_size) == (32, 64)
