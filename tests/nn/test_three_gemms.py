"""Shapes, dtypes and padding of GEMM operands, and agreement between modes. Other tests check their values."""

import itertools

import pytest
import torch

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx import ops as mxfp8
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mx.reference import from_blocked
from mxtrain.formats.nvfp4 import ops as nvfp4_ops
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs
from tests.support.casts import cast

MXFP8, FLOOR, NVFP4 = get_recipe("mxfp8"), get_recipe("mxfp8", scale_rounding="floor"), get_recipe("nvfp4")
TILES = get_recipe("mxfp8_2d")
MXFP4, E5M2 = get_recipe("mxfp4"), get_recipe("fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2")
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


def gemms(recipe, mode="reference") -> ThreeGEMMs:
    return ThreeGEMMs(recipe.key, mode, WHOLE)


def all_operands(recipe, mode, tokens, dim, outputs, dtype=torch.float32):
    """Every operand of a norm, a linear behind it, and a linear without a norm, by (name, rows, length)."""
    x, w = draw(tokens, dim, dtype=dtype), draw(outputs, dim) * 700
    dy = draw(tokens, outputs, seed=2, dtype=dtype) * 3e-5
    for matrix in (x, w, dy) if tokens else (w,):
        # All other blocks get the smallest block scale, which makes their values depend on the tensor scale.
        matrix[0, 3] *= 3e5
    rho, gain = draw(tokens, seed=1).abs(), draw(dim, seed=3)
    layer = gemms(recipe, mode)
    for_dgrad, for_wgrad = layer.quantize_gradients([dy], True, True, signs(), [draws()])
    fprop = recipe.fprop
    normed = fprop.ops.normalize(x, RMSEstimate.for_recipe(fprop), fprop, mode)[0]
    return {
        ("X", tokens, dim): layer.quantize_activation(x),
        ("norm", tokens, dim): normed,
        ("X along tokens", dim, tokens): layer.quantize_along_tokens(x, rho, signs()),
        ("W", outputs, dim): layer.quantize_weights([w], gain)[1],
        ("W transposed", dim, outputs): layer.quantize_weights([w], None)[0],
        ("dY", tokens, outputs): for_dgrad,
        ("dY along tokens", outputs, tokens): for_wgrad,
    }


def values(operand, recipe):
    """Codes times scales of a native operand, after undoing the blocked layout."""
    data, scales, tensor_scale = operand
    if recipe.format.block_size == 16:
        rows, k = data.shape[0], 2 * data.shape[1]
        tensor_scale = tensor_scale.unsqueeze(1) if tensor_scale.ndim else tensor_scale
        return nvfp4.dequantize(data, from_blocked(scales, rows, -(-k // 64) * 4)[:, : k // 16], tensor_scale)
    rows, k = data.shape
    return casts.dequantize(data, from_blocked(scales, rows, k // 32), recipe.format)


@pytest.mark.parametrize(
    ("recipe", "tokens", "dim", "outputs"),
    [
        (get_recipe("mxfp8"), 37, 64, 160),
        (get_recipe("mxfp8", scale_rounding="floor"), 64, 96, 32),
        (TILES, 33, 64, 96),
        (NVFP4, 17, D, 16),
        (PLAIN, 5, 32, 16),
        (get_recipe("nvfp4_row", stochastic_rounding=False), 5, D, 16),
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
        k = native.data.shape[1] * (2 if recipe.tensor_scaled else 1)
        assert native.data.is_contiguous() and k % 32 == 0 and k < length + 32, "whole blocks of the tensor cores"
        got = values(native, recipe)
        used = emulated.data.shape[1]
        assert torch.equal(got[:, :used], reference.data), name
        assert not got[:, used:].any(), "zeros pad the last block"


@pytest.mark.parametrize("recipe", [MXFP4, get_recipe("mxfp4", hadamard=False), E5M2], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operands_are_the_same_values_where_no_tensor_cores_take_the_codes(recipe, dtype):
    """This machine's take none, so mode "native" has the operands of mode "emulated", but for MXFP8's fprop."""
    of_mode = [all_operands(recipe, mode, 37, 64, 160, dtype) for mode in ("reference", "emulated", "native")]
    for (name, rows, length), reference in of_mode[0].items():
        emulated, native = (operands[name, rows, length] for operands in of_mode[1:])
        padded = 64 if length == 37 and recipe.wgrad.hadamard else length
        assert reference.data.shape == (rows, padded) and reference.data.dtype == torch.float32
        assert torch.equal(emulated.data.float(), reference.data), name
        if native.scales is None:
            assert_same_operand(native, emulated)
        else:
            assert recipe is E5M2 and name in ("X", "norm", "W")


@pytest.mark.parametrize("recipe", [MXFP4, get_recipe("mxfp4", hadamard=False), E5M2], ids=str)
def test_errors_of_products_are_those_of_their_elements(recipe):
    """With the transform, blocks of 32 tokens are mixed in both operands of wgrad, and their product stays."""
    x, w, dy = draw(96, 64), draw(32, 64, seed=1), draw(96, 32, seed=2)
    layer = gemms(recipe)
    for_dgrad, for_wgrad = layer.quantize_gradients([dy], True, True, None, [None])
    dw = layer.wgrad(for_wgrad, layer.quantize_along_tokens(x), torch.float32)
    dx = layer.dgrad(for_dgrad, [w], torch.float32)
    least, most = (0.02, 0.06) if recipe is E5M2 else (0.1, 0.25)
    for got, want in ((dw, dy.t() @ x), (dx, dy @ w)):
        assert least < (got - want).norm() / want.norm() < most


@pytest.mark.parametrize(("name", "tiles"), [("nvfp4", False), ("nvfp4_row", True)])
def test_all_modes_hold_the_same_values_beside_exact_tensor_scales(name, tiles):
    recipe = get_recipe(name, four_over_six="both", weight_tiles=tiles)
    reference, emulated, native = (
        all_operands(recipe, mode, 17, D, 16) for mode in ("reference", "emulated", "native")
    )
    for key, of in reference.items():
        assert torch.equal(emulated[key].data.float(), of.data) and emulated[key].data.dtype == torch.bfloat16
        used = emulated[key].data.shape[1]
        if key[0].startswith("dY"):
            assert of.tensor_scale is None is emulated[key].tensor_scale
            assert torch.equal(values(native[key], recipe)[:, :used], of.data)
        else:
            assert of.tensor_scale.ndim == (name == "nvfp4_row" and key[0] in ("X", "norm"))
            assert torch.equal(of.tensor_scale, emulated[key].tensor_scale)
            assert torch.equal(of.tensor_scale, native[key].tensor_scale)
            scale_of_one = native[key]._replace(tensor_scale=torch.ones(()))
            assert torch.equal(values(scale_of_one, recipe)[:, :used], of.data)


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
    by_dim = [gemms(NVFP4).quantize_weights([w], None, (dim,))[dim].data for dim in (0, 1)]
    assert torch.equal(by_dim[0], by_dim[1].t())
    blocks = [gemms(PLAIN).quantize_weights([w], None, (dim,))[dim].data for dim in (0, 1)]
    assert not torch.equal(blocks[0], blocks[1].t())
    scale = nvfp4.power_of_two_tensor_scale(w)
    assert torch.equal(blocks[0], nvfp4.dequantize(*nvfp4.cast(w.t(), scale), scale))
    w = draw(N, 64) ** 9
    for recipe, are_equal in ((TILES, True), (MXFP8, False)):
        by_dim = gemms(recipe).quantize_weights([w], None)
        assert torch.equal(by_dim[0].data, by_dim[1].data.t()) == are_equal
        for_dgrad, _ = gemms(recipe).quantize_gradients([w], True, False, None, [None])
        assert torch.equal(for_dgrad.data, casts.image(w, recipe.format, "rceil", 1, torch.float32)), "in blocks"


def test_transform_and_padding_leave_wgrad_unchanged_up_to_the_casts():
    x, dy = draw(37, D), draw(37, N, seed=1)
    _, for_wgrad = gemms(NVFP4).quantize_gradients([dy], False, True, signs(), [draws()])
    dw = for_wgrad.data @ gemms(NVFP4).quantize_along_tokens(x, None, signs()).data.t()
    assert (dw - dy.t() @ x).norm() < 0.25 * (dy.t() @ x).norm()
    _, plain = gemms(PLAIN).quantize_gradients([dy], False, True, None, [None])
    assert not plain.data[:, 37:].any()


def test_gradients_with_too_many_elements_for_random_bits():
    dy = torch.zeros(()).expand(2**17 + 1, 2**17)
    with pytest.raises(ValueError, match="more than the 17179869184 elements"):
        gemms(NVFP4).quantize_gradients([dy], True, False, signs(), [draws()])


def assert_same_operand(found, expected) -> None:
    for got, want in zip(found, expected, strict=True):
        assert (got is None) == (want is None)
        if got is not None:
            as_bytes = [t.reshape(-1).contiguous().view(torch.uint8) for t in (got, want)]
            assert got.shape == want.shape and got.dtype == want.dtype and torch.equal(*as_bytes)
    assert found.data.stride() == expected.data.stride(), "or a product may add up in another order"


@pytest.mark.parametrize(
    ("recipe", "sizes"), [(MXFP8, (37, 64, 160)), (TILES, (5, 64, 96)), (NVFP4, (17, D, 16))], ids=str
)
def test_native_operands_without_triton_are_those_of_the_kernels(recipe, sizes, monkeypatch):
    expected = all_operands(recipe, "native", *sizes)
    for module in (mxfp8, nvfp4_ops):
        monkeypatch.setattr(module, "runs_kernels", lambda *unused: False)
    for name, operand in all_operands(recipe, "native", *sizes).items():
        assert_same_operand(operand, expected[name])


CASES = [
    *itertools.product(("mxfp8", "nvfp4"), ("native", "emulated", "reference")),
    ("mxfp8", "fp8_merged"),
    ("unquantized", "emulated"),
    ("nvfp4_dynamic", "reference"),
    *((get_recipe("nvfp4", four_over_six="both"), mode) for mode in ("emulated", "reference")),
    (get_recipe("nvfp4_row", four_over_six="both"), "emulated"),
    *itertools.product(("nvfp4_row",), ("native", "emulated", "reference")),
]


@pytest.mark.parametrize("recipe, mode", CASES)
def test_codes_stand_for_the_operand(device, recipe, mode):
    recipe = get_recipe(recipe)
    generator = torch.Generator(device).manual_seed(0)
    x = (torch.randn(64, 32, generator=generator) ** 25).bfloat16()
    estimate = RMSEstimate.for_recipe(recipe)
    operand, rho = recipe.ops.normalize(x, estimate, recipe, mode)
    codes, own_rho = recipe.ops.normalize(x, estimate, recipe, mode, as_codes=True)
    assert torch.equal(rho, own_rho)
    assert_same_operand(recipe.ops.from_codes(codes, mode, 1), operand)

    expected = gemms(recipe, mode).quantize_along_tokens(x, rho, signs())
    codes = cast([x], recipe, mode, (0,), row_factor=rho, signs=signs(), as_codes=True)[0]
    assert_same_operand(recipe.ops.from_codes(codes, mode, 0), expected)
