"""Stored codes and scales against hand-computed blocks, and against the operand that a layer's GEMM gets."""

import pytest
import torch

from mxtrain import MXLinear, MXNorm, MXNormLinear
from mxtrain.formats.matrices import Codes
from mxtrain.formats.nvfp4 import NVFP4
from mxtrain.formats.ops import FormatOps
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import FORMATS
from tests.support.stored_values import VALUES

D, N = 64, 96


def numbers(*shape: int, seed: int = 0, scale: float = 0.02) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def stored(weight: torch.Tensor, recipe, order=None) -> dict[str, torch.Tensor]:
    fprop = recipe.fprop
    return fprop.ops.stored("x", fprop.ops.encode(weight, fprop).rows(order))


@pytest.fixture
def operands(monkeypatch):
    """The weight operands of the GEMMs that run."""
    found, matmul = [], FormatOps.matmul

    def recorded(ops, a, b, dtype):
        found.append(b.data)
        return matmul(ops, a, b, dtype)

    monkeypatch.setattr(FormatOps, "matmul", recorded)
    return found


RECIPES = {
    "mxfp8": get_recipe("mxfp8"),
    "mxfp8, floor": get_recipe("mxfp8", scale_rounding="floor"),
    "mxfp8, tiles": get_recipe("mxfp8_2d"),
    "mxfp4": get_recipe("mxfp4"),
    "nvfp4": get_recipe("nvfp4"),
    "nvfp4, blocks": get_recipe("nvfp4", weight_tiles=False),
    "fprop alone": get_recipe("fprop=nvfp4, dgrad=mxfp8, wgrad=bf16"),
}
EXACT = get_recipe("nvfp4_4over6")


@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_stored_values_are_the_operand_of_a_linears_fprop(recipe, dtype, has_norm, operands):
    """Behind an MXNorm they are those of the weight with the norm's gain folded."""
    options = {"recipe": recipe, "mode": "reference", "dtype": dtype}
    linear = (MXNormLinear if has_norm else MXLinear)(D, N, bias=False, **options)
    x, weight = numbers(5, D).to(dtype), linear.weight.detach().float()
    if has_norm:
        norm = MXNorm(D, **options)
        with torch.no_grad():
            norm.weight.copy_(1 + numbers(D, seed=1, scale=0.3))
        x, weight = norm(x), weight * norm.weight.detach().float()
    linear(x)
    name = recipe.fprop.format.name
    assert torch.equal(VALUES[name](stored(weight, recipe), "x"), operands[0])


@pytest.mark.parametrize("name", [name for name, fmt in FORMATS.items() if fmt.layout])
def test_rows_are_put_in_order_after_the_cast(name):
    """A tile of 16 x 16 has one scale in TorchTitan's order of rows; in Hugging Face's its rows are apart."""
    order = torch.randperm(N, generator=torch.Generator().manual_seed(1))
    weight = numbers(N, D) * torch.exp2(torch.arange(N) % 7)[:, None]
    recipe = RECIPES[name]
    in_place = VALUES[name](stored(weight, recipe), "x")
    moved = VALUES[name](stored(weight, recipe, order), "x")
    assert torch.equal(moved, in_place[order])
    if name == "nvfp4":
        assert not torch.equal(moved, VALUES[name](stored(weight[order], recipe), "x"))


def test_a_block_of_mxfp8_by_hand():
    row = torch.zeros(1, 32)
    row[0, :4] = torch.tensor([1000.0, -3.3, 0.01, 500.0])
    # 1000 / 448 lies between 2 and 4: the scale is 4, stored as 127 + 2. E4M3 keeps three bits after the leading one:
    # 250 -> 256, -0.825 -> -0.8125, 0.0025 is closest to 1 * 2^-9, 125 -> 128 (a tie between 120 and 128 is at 124).
    tensors = stored(row, RECIPES["mxfp8"])
    assert tensors["x.weight_scale"].tolist() == [[129]]
    assert tensors["x.weight"][0, :5].float().tolist() == [256.0, -0.8125, 2.0**-9, 128.0, 0.0]
    assert VALUES["mxfp8"](tensors, "x")[0, :4].tolist() == [1024.0, -3.25, 2.0**-7, 512.0]


def test_a_block_of_nvfp4_by_hand():
    row = torch.zeros(1, 32)
    row[0, :4] = torch.tensor([2688.0, -448.0, 700.0, 1.0])
    row[0, 16:18] = torch.tensor([3.0, -1.4])
    # 2688 = 6 * 448 needs the tensor scale 1. The first block scale is 448: 6, -1, 1.5625 -> 1.5, 0.002 -> 0.
    # The second is 3 / 6 = 0.5: 6, -2.8 -> -3. The low half of a byte comes first; the sign is bit 3.
    tensors = stored(row, RECIPES["nvfp4"])
    assert tensors["x.weight_global_scale"].tolist() == [1.0]
    assert tensors["x.weight_scale"].float().tolist() == [[448.0, 0.5]]
    assert tensors["x.weight_packed"][0, [0, 1, 2, 8]].tolist() == [0x7 | 0xA << 4, 0x3, 0x0, 0x7 | 0xD << 4]
    assert VALUES["nvfp4"](tensors, "x")[0, [0, 1, 2, 3, 16, 17]].tolist() == [2688.0, -448.0, 672.0, 0.0, 3.0, -1.5]


def codes_of(weight: torch.Tensor, recipe=RECIPES["nvfp4, blocks"]) -> Codes:
    return NVFP4.ops.encode(weight, recipe.fprop)


def test_one_tensor_scale_leaves_all_values_as_they_were():
    weights = [codes_of(numbers(32, D, seed=seed, scale=scale)) for seed, scale in enumerate((0.02, 0.3, 0.07))]
    assert len({weight.tensor_scale.item() for weight in weights}) == 3
    unified = NVFP4.ops.with_one_tensor_scale(weights)
    for before, after in zip(weights, unified, strict=True):
        assert after.tensor_scale == weights[1].tensor_scale
        assert torch.equal(after.data, before.data)
        values = [VALUES["nvfp4"](NVFP4.ops.stored("x", codes), "x") for codes in (before, after)]
        assert torch.equal(*values)


def test_exact_tensor_scales_serve_weights_with_equal_ones_only():
    weight = codes_of(torch.full((1, 16), 0.125), EXACT)
    before, *after = (NVFP4.ops.stored("x", c) for c in (weight, *NVFP4.ops.with_one_tensor_scale([weight, weight])))
    assert all(all(map(torch.equal, before.values(), tensors.values())) for tensors in after)
    plain = codes_of(torch.full((1, 16), 0.125 * 2688))
    assert plain.tensor_scale == weight.tensor_scale == 0.125, "a scale, and a largest magnitude"
    assert NVFP4.ops.with_one_tensor_scale([plain, weight]) is None
    (zeros,) = NVFP4.ops.with_one_tensor_scale([codes_of(torch.zeros(1, 16), EXACT)])
    tensors = NVFP4.ops.stored("x", zeros)
    assert not VALUES["nvfp4"](tensors, "x").any() and tensors["x.weight_global_scale"].isfinite()


@pytest.mark.parametrize(
    ("scale", "is_possible"),
    [
        (2.0**-9, True),  # the smallest number of E4M3
        (5 * 2.0**-9, True),
        (2.0**-10, False),
        (1.25 * 2.0**-8, False),  # 2.5 * 2^-9: between two numbers
    ],
)
def test_one_tensor_scale_only_where_e4m3_holds_the_block_scales(scale, is_possible):
    large = codes_of(torch.full((1, 16), 2688.0))  # tensor scale 1
    small = Codes(large.data, torch.tensor([[scale * 16]]).to(torch.float8_e4m3fn), torch.tensor(1 / 16))
    unified = NVFP4.ops.with_one_tensor_scale([large, small])
    assert (unified is not None) == is_possible
    if is_possible:
        assert unified[1].scales.item() == scale


def test_blocks_of_zeros_take_any_scale():
    large = codes_of(torch.full((1, 16), 2688.0))
    row = torch.zeros(1, 32)
    row[0, :16], row[0, 16:] = 2688 / 16, -0.0
    small = codes_of(row)
    assert small.tensor_scale == 1 / 16 and small.scales[0, 1] == 2.0**-6  # which would become 2^-10
    unified = NVFP4.ops.with_one_tensor_scale([large, small])
    assert VALUES["nvfp4"](NVFP4.ops.stored("x", unified[1]), "x").tolist() == row.tolist()
