"""Mode "fp8_merged" in layers: near the other modes, for any number of tokens, and refused where it cannot run."""

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from mxtrain import ConfigError, MXLinear, MXNorm
from mxtrain.formats.hardware import MERGED
from mxtrain.formats.matrices import Codes, Operand
from mxtrain.formats.mx.merged import is_tiled, merge, values_of
from mxtrain.formats.mx.reference import cast
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.parse import get_recipe
from mxtrain.nn.gated_norm import normalize_groups
from mxtrain.nn.group import LinearGroup
from mxtrain.nn.normed_input import pack, unpack
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs
from tests.support.layer_checks import NormBlock, assert_near, draw, mx_linear, results_of

D, N = 256, 128
E5M2 = "fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8"

pytestmark = pytest.mark.usefixtures("device", "rounding_step")


def gemms(recipe="mxfp8", mode=MERGED):
    return ThreeGEMMs(get_recipe(recipe).key, mode, WHOLE)


def with_outliers(rows, columns, seed=0):
    x = draw(rows, columns, seed=seed, dtype=torch.bfloat16)
    x[:, 3] *= 64
    return x


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_tiles", E5M2, "fprop=mxfp8, dgrad=bf16, wgrad=mxfp8"])
@pytest.mark.parametrize("tokens", [130, 1])
def test_results_are_those_of_mode_reference_but_for_rare_roundings(recipe, tokens):
    if recipe == "mxfp8_tiles":
        recipe = get_recipe("mxfp8", weight_tiles=True)
    x, dy = with_outliers(tokens, D), draw(tokens, N, seed=1, dtype=torch.bfloat16)
    found = [results_of(mx_linear(D, N, recipe, mode, torch.bfloat16), x, dy) for mode in (MERGED, "reference")]
    for got, want in zip(*found, strict=True):
        assert error(got, want) < 3e-3  # both are rounded to bf16


def test_operands_and_the_codes_that_they_stand_for():
    of = gemms()
    x, w, dy = with_outliers(130, D), draw(N, D, seed=1), draw(130, N, seed=2)
    weights = of.quantize_weights([w], None)
    rows, columns = of.quantize_gradients([dy], True, True, None, [None])
    operands = [of.quantize_activation(x), *weights.values(), rows, columns, of.quantize_along_tokens(x)]
    assert [is_tiled(*operand[:2]) for operand in operands] == [False, True, True, False, False, True]
    assert columns.data.shape == (N, 256)  # tokens are padded to whole groups
    normed, rho = of.recipe.ops.normalize(x, MXNorm(D).estimate, of.recipe, MERGED)
    codes = of.recipe.ops.codes_of(normed)
    same = of.recipe.ops.from_codes(codes, MERGED, 1)
    assert torch.equal(same.data.float(), normed.data.float()) and torch.equal(same.scales, normed.scales)
    sent = unpack(pack(codes), MXFP8, torch.bfloat16)
    assert torch.equal(sent, values_of(normed, torch.bfloat16))
    grouped, rhos = normalize_groups(x, 2, MXNorm(D // 2).estimate, of.recipe, MERGED)
    own = of.recipe.ops.normalize(x.view(-1, D // 2), MXNorm(D // 2).estimate, of.recipe, "reference")
    assert rhos.shape == (130, 2) and error(values_of(grouped, torch.float32), own[0].data.view(130, D)) < 1e-3


def test_dequantized_backward_multiplies_the_merged_values():
    recipe, x, dy = get_recipe("mxfp8", backward="dequantized"), with_outliers(64, D), draw(64, N, seed=1)
    x[::2, :32] *= 2.0**-14  # changes many codes
    linear = mx_linear(D, N, recipe, MERGED)
    of = linear.gemms(x.device)
    w, xhat = of.quantize_weights([linear.weight], None), of.quantize_activation(x)
    assert torch.equal(w[0].data.t().float(), values_of(w[1], torch.float32))
    assert torch.equal(of.quantize_along_tokens(x).data.t().float(), values_of(xhat, torch.float32))
    assert not torch.equal(of.quantize_along_tokens(x).data.t(), gemms(recipe, "emulated").quantize_activation(x).data)
    results_of(linear, x.float(), dy)


@pytest.mark.parametrize("joined", [True, False])
def test_ready_weights_and_one_gemm_for_a_norms_linears(joined):
    x, dy = draw(6, D, seed=0), draw(6, N, seed=1)
    alone = NormBlock(D, N, "mxfp8", "mxfp8", mode=MERGED)
    want = results_of(alone, x, dy, dy)
    block = NormBlock(D, N, "mxfp8", "mxfp8", mode=MERGED)
    block.norm.group = LinearGroup(block.linears)
    block.norm.group.joins_fprop = joined
    for linear in block.linears:
        linear.fed_by = (block.norm,)
    ReadyWeights([block]).refresh()
    assert block.norm.group.ready is not None
    for got, expected in zip(results_of(block, x, dy, dy), want, strict=True):
        assert error(got, expected) < (1e-3 if x.is_cuda else 1e-6)  # FP8 tensor cores sum in another order


def test_a_nan_poisons_its_block_alone():
    x = draw(128, 128, seed=0)
    x[5, 40] = float("nan")
    for tiles in (False, True):
        values = values_of(merge(Codes(*cast(x, MXFP8, "rceil")), tiles), torch.float32)
        want = torch.zeros_like(x, dtype=torch.bool)
        want[5, 32:64] = True
        assert torch.equal(values.isnan(), want)


def test_what_the_mode_refuses():
    for recipe, name in (("nvfp4", "NVFP4"), ("mxfp4", "MXFP4"), ("fprop=mxfp8, dgrad=nvfp4, wgrad=mxfp8", "NVFP4")):
        for build in (
            lambda r: MXLinear(128, 128, recipe=r, mode=MERGED),
            lambda r: MXNorm(128, recipe=r, mode=MERGED),
        ):
            with pytest.raises(ConfigError, match=f"merges E4M3 codes .*, which {name} does not have"):
                build(recipe)
    with pytest.raises(ConfigError, match="128 does not divide its 96 output features; use mode 'emulated'"):
        MXLinear(128, 96, mode=MERGED)
    parts = [draw(96, 128, seed=0), draw(160, 128, seed=1)]
    with pytest.raises(ValueError, match="96"):
        gemms().quantize_weights(parts, None)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_compiled_block_is_one_graph(checkpointed, compile_backend):
    block, x, dy = NormBlock(D, N, "mxfp8", mode=MERGED), draw(40, D, seed=0), draw(40, N, seed=1)
    run = torch.compile(checkpoint_wrapper(block) if checkpointed else block, backend=compile_backend, fullgraph=True)
    assert_near(results_of(run, x, dy), results_of(block, x, dy), 2e-2 if compile_backend == "inductor" else 1e-6)


def test_operand_without_rows():
    assert isinstance(gemms().quantize_activation(torch.zeros(0, 128)), Operand)
    linear, x = mx_linear(256, 128, "mxfp8", MERGED), torch.zeros(0, 256, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad.shape == (0, 256) and not linear.weight.grad.any()
