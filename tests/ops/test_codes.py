"""Codes that stand for operands have the bits of the operands, in every mode."""

import itertools

import pytest
import torch

from mxtrain.ops.mxnorm import normalize, normalized_codes
from mxtrain.ops.quantize import activation_along_tokens, codes_along_tokens, from_codes
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.rng.seeds import hadamard_signs, sign_mask

TOKENS, DIM = 64, 96


def assert_same_operand(found, expected) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            as_bytes = [t.reshape(-1).contiguous().view(torch.uint8) for t in (got, want)]
            assert got.shape == want.shape and got.dtype == want.dtype and torch.equal(*as_bytes)
    assert found.data.stride() == expected.data.stride(), "or a product may add up in another order"


# Kernels of NVFP4 take seconds in Triton's interpreter.
SLOW = [
    pytest.param(recipe, mode, marks=pytest.mark.sweep)
    for recipe, mode in itertools.product(("nvfp4", "nvfp4_dynamic"), ("native", "emulated"))
    if (recipe, mode) != ("nvfp4", "emulated")
]
QUICK = [
    *itertools.product(("mxfp8", "unquantized"), ("native", "emulated", "reference")),
    *itertools.product(("nvfp4", "nvfp4_dynamic"), ("reference",)),
    ("nvfp4", "emulated"),
]


@pytest.mark.parametrize("recipe, mode", [*QUICK, *SLOW])
def test_codes_stand_for_the_operand(device, recipe, mode):
    recipe = get_recipe(recipe)
    generator = torch.Generator(device).manual_seed(0)
    x = (torch.randn(TOKENS, DIM, generator=generator) ** 25).bfloat16()
    estimate = RMSEstimate.for_recipe(recipe)
    operand, rho = normalize(x, estimate, recipe, mode)
    codes, own_rho = normalized_codes(x, estimate, recipe, mode)
    assert torch.equal(rho, own_rho)
    assert_same_operand(from_codes(codes, recipe, mode, 1), operand)

    signs = torch.tensor(sign_mask(hadamard_signs(0, "norm")), dtype=torch.int64)
    expected = activation_along_tokens(x, recipe, mode, rho, signs)
    codes = codes_along_tokens(x, recipe, mode, rho, signs)
    assert_same_operand(from_codes(codes, recipe, mode, 0), expected)
