"""Shapes, dtypes and padding of GEMM operands, and agreement between modes. tests/nn checks their values."""

import ast
import inspect

import pytest
import torch

from mxtrain.ops import mxfp8, mxnorm, quantize
from mxtrain.ops import nvfp4 as nvfp4_casts
from mxtrain.ops.mxnorm import normalize
from mxtrain.ops.quantize import activation, activation_along_tokens, gradient, weight
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference import casts, nvfp4
from mxtrain.reference.casts import from_blocked

MXFP8, FLOOR, NVFP4 = get_recipe("mxfp8"), get_recipe("mxfp8", scale_rounding="floor"), get_recipe("nvfp4")
PLAIN = get_recipe("nvfp4", weight_tiles=False, hadamard=False, stochastic_rounding=False)
D, N = 48, 32

pytestmark = pytest.mark.usefixtures("device")


def draw(*shape, seed=0, dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(dtype).to(torch.get_default_device())


def signs():
    return torch.tensor(0b1010)


def draws():
    return torch.tensor([1, 3, 0, 0])


def all_operands(recipe, mode, tokens, dim, outputs, dtype=torch.float32):
    """Every operand of a norm, a linear behind it, and a linear without a norm, by (name, rows, length)."""
    x, w = draw(tokens, dim, dtype=dtype), draw(outputs, dim) * 700
    dy = draw(tokens, outputs, seed=2, dtype=dtype) * 3e-5
    for matrix in (x, w, dy) if tokens else (w,):
        # All other blocks get the smallest block scale, which makes their values depend on the tensor scale.
        matrix[0, 3] *= 3e5
    rho, gain = draw(tokens, seed=1).abs(), draw(dim, seed=3)
    for_dgrad, for_wgrad = gradient(dy, recipe, mode, True, True, signs(), draws())
    normed = normalize(x, RMSEstimate.for_recipe(recipe), recipe, mode)[0]
    return {
        ("X", tokens, dim): activation(x, recipe, mode),
        ("norm", tokens, dim): normed,
        ("X along tokens", dim, tokens): activation_along_tokens(x, recipe, mode, rho, signs()),
        ("W", outputs, dim): weight(w, recipe, mode, 1, gain),
        ("W transposed", dim, outputs): weight(w, recipe, mode, 0, None),
        ("dY", tokens, outputs): for_dgrad,
        ("dY along tokens", outputs, tokens): for_wgrad,
    }


def values(operand, recipe):
    """Codes times scales of a native operand, after undoing the blocked layout."""
    data, scales, tensor_scale = operand
    if recipe.format.block_size == 16:
        rows, k = data.shape[0], 2 * data.shape[1]
        return nvfp4.dequantize(data, from_blocked(scales, rows, -(-k // 64) * 4)[:, : k // 16], tensor_scale)
    rows, k = data.shape
    return casts.dequantize(data, from_blocked(scales, rows, k // 32), recipe.format)


@pytest.mark.parametrize(
    ("recipe", "tokens", "dim", "outputs"),
    [
        (get_recipe("mxfp8"), 37, 64, 160),
        (get_recipe("mxfp8", scale_rounding="floor"), 64, 96, 32),
        (NVFP4, 21, D, N),
        (PLAIN, 5, D, N),
    ],
    ids=str,
)
def test_all_modes_hold_the_same_values(recipe, tokens, dim, outputs):
    """Exactly, tensor scale included: scales of whole tensors are powers of two."""
    by_mode = [all_operands(recipe, mode, tokens, dim, outputs) for mode in ("reference", "emulated", "native")]
    for (name, rows, length), reference in by_mode[0].items():
        emulated, native = (operands[name, rows, length] for operands in by_mode[1:])
        assert reference.data.dtype == torch.float32 and emulated.data.dtype == torch.bfloat16
        assert reference[1:] == emulated[1:] == (None, None)
        assert emulated.data.shape[0] == rows and length <= emulated.data.shape[1] < length + 16, name
        assert torch.equal(emulated.data.float(), reference.data), name
        k = native.data.shape[1] * (2 if recipe.is_nvfp4 else 1)
        assert native.data.is_contiguous() and k % 32 == 0 and k < length + 32, "whole blocks of the tensor cores"
        got = values(native, recipe)
        used = emulated.data.shape[1]
        assert torch.equal(got[:, :used], reference.data), name
        assert not got[:, used:].any(), "zeros pad the last block"


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_token_counts_from_zero(mode):
    counts = (0, 1, 16) if mode == "reference" else (0,)
    for tokens in counts:
        for (_, rows, length), operand in all_operands(NVFP4, mode, tokens, D, N, torch.bfloat16).items():
            padded = -(-tokens // 16) * 16 if length == tokens else length
            assert operand.data.shape == (rows, padded) and operand.data.isfinite().all()
            assert operand.data.dtype == (torch.bfloat16 if mode == "emulated" else torch.float32)


def test_weights_in_tiles_are_the_same_in_both_orientations_and_blocks_are_not():
    w = draw(N, D)
    by_dim = [weight(w, NVFP4, "reference", dim, None).data for dim in (0, 1)]
    assert torch.equal(by_dim[0], by_dim[1].t())
    blocks = [weight(w, PLAIN, "reference", dim, None).data for dim in (0, 1)]
    assert not torch.equal(blocks[0], blocks[1].t())
    scale = nvfp4.power_of_two_tensor_scale(w)
    assert torch.equal(blocks[0], nvfp4.dequantize(*nvfp4.cast(w.t(), scale), scale))


def test_transform_and_padding_leave_wgrad_unchanged_up_to_the_casts():
    x, dy = draw(37, D), draw(37, N, seed=1)
    _, for_wgrad = gradient(dy, NVFP4, "reference", False, True, signs(), draws())
    dw = for_wgrad.data @ activation_along_tokens(x, NVFP4, "reference", None, signs()).data.t()
    assert (dw - dy.t() @ x).norm() < 0.25 * (dy.t() @ x).norm()
    _, plain = gradient(dy, PLAIN, "reference", False, True, None, None)
    assert not plain.data[:, 37:].any()


def test_both_formats_have_the_same_function_for_every_role():
    """``module_of(recipe).ROLE``: whoever adds a format writes these."""
    calls = [
        node.func.attr
        for module in (quantize, mxnorm)
        for node in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Call)
    ]
    assert "activation" in calls and "normalize" in calls
    for role in set(calls):
        mx, nv = (list(inspect.signature(getattr(module, role)).parameters.items()) for module in (mxfp8, nvfp4_casts))
        assert [(name, p.default, p.kind) for name, p in mx] == [(name, p.default, p.kind) for name, p in nv], role
