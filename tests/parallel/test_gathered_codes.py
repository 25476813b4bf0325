"""What FSDP sends, and would send as codes: the table in train_configs/LAYOUTS.md."""

from pathlib import Path

import pytest
import torch
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.model.model import Transformer

from mxtrain.recipes.formats import MXFP8, NVFP4

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


@pytest.mark.parametrize("flavor", ["8B", "70B"])
def test_the_table(flavor):
    transformer = model(flavor)
    bf16, mxfp8, nvfp4 = (bytes_of_step(transformer, b) for b in (2, MXFP8.bytes_per_element, NVFP4.bytes_per_element))
    row = " | ".join([f"{bf16 / 2**30:.1f}", *(f"{sent / 2**30:.1f} ({sent / bf16:.2f})" for sent in (mxfp8, nvfp4))])
    assert f"| {flavor} | {row} |" in LAYOUTS.read_text()
    fewest_rows = min(weight.shape[0] for weight in transformer.layers.parameters() if weight.ndim == 2)
    assert (fewest_rows // MXFP8.block_size, fewest_rows // NVFP4.block_size) == (32, 64)
