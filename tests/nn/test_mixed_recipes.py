"""Layers whose GEMMs have recipes of their own, against layers with one recipe for all."""

from functools import partial
from itertools import product

import pytest
import torch

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear, set_rounding_step
from mxtrain.formats.mx.ops import MXKernelOps
from mxtrain.formats.nvfp4.ops import NVFP4Ops
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import GEMMS
from tests.support.layer_checks import SEED, NormBlock, draw, mx_linear, results_of

D, N, T = 64, 96, 37
FORMATS = ("mxfp8", "nvfp4", "bf16")
layer, block_of = partial(mx_linear, D, N), partial(NormBlock, D, N)

pytestmark = pytest.mark.usefixtures("device", "rounding_step")


def spec(*names):
    return ", ".join(f"{gemm}={name}" for gemm, name in zip(GEMMS, names, strict=True))


MIXED = [names for names in product(FORMATS, repeat=3) if len(set(names)) > 1]
# Every format in every GEMM once.
ROTATIONS = [FORMATS, FORMATS[1:] + FORMATS[:1], FORMATS[2:] + FORMATS[:2]]


@pytest.mark.parametrize(
    ("mode", "dtype", "mixed", "tokens"),
    [("reference", torch.float32, MIXED, T), ("emulated", torch.bfloat16, ROTATIONS[:1], 5)],
)
def test_every_gemm_of_a_linear_is_that_of_its_recipe(mode, dtype, mixed, tokens):
    x, dy = draw(tokens, D, seed=0, dtype=dtype), draw(tokens, N, seed=1, dtype=dtype)
    plain = {name: results_of(layer(name, mode, dtype), x, dy) for name in FORMATS}
    assert not any(torch.equal(a, b) for a, b in zip(plain["mxfp8"], plain["nvfp4"]))
    for names in mixed:
        got = results_of(layer(spec(*names), mode, dtype), x, dy)
        for gemm, (name, result) in enumerate(zip(names, got, strict=True)):
            assert torch.equal(result, plain[name][gemm]), (names, GEMMS[gemm])


def test_every_gemm_behind_a_norm_is_that_of_its_recipe():
    """With the exact RMS, which is the same for all formats: gradients are equal to the bit."""
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    plain = {name: results_of(block_of(name, estimator="exact"), x, dy) for name in FORMATS}
    for names in ROTATIONS:
        fprop, dgrad, wgrad = names
        y, dx, dgain, dw = results_of(block_of(spec(*names), estimator="exact"), x, dy)
        assert torch.equal(y, plain[fprop][0]) and torch.equal(dx, plain[dgrad][1]), names
        assert torch.equal(dgain, plain[wgrad][2]) and torch.equal(dw, plain[wgrad][3]), names


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize("fprop", FORMATS)
def test_the_norm_follows_the_recipe_of_fprop(fprop, mode):
    """The estimate reads blocks of fprop's format, or blocks of 32 without a format."""
    other = "mxfp8" if fprop == "nvfp4" else "nvfp4"
    norm, plain = (block_of(r, mode=mode).norm for r in (spec(fprop, other, other), fprop))
    assert norm.estimate == plain.estimate and norm.estimate.block_size == (16 if fprop == "nvfp4" else 32)
    normed, expected = norm(draw(T, D, seed=0)), plain(draw(T, D, seed=0))
    assert torch.equal(normed.xhat.data, expected.xhat.data) and torch.equal(normed.rho, expected.rho)


def test_linears_of_one_norm_may_have_different_backward_recipes():
    x, dys = draw(T, D, seed=0), [draw(T, N, seed=s) for s in (1, 2, 3)]
    backward = [("mxfp8", "mxfp8"), ("bf16", "nvfp4"), ("nvfp4", "bf16")]
    recipes = [spec("mxfp8", *names) for names in backward]
    *ys, dx, dgain, dw0, dw1, dw2 = results_of(block_of(*recipes, norm=recipes[1]), x, *dys)
    plain = {name: results_of(block_of(*[name] * 3), x, *dys) for name in FORMATS}
    assert all(torch.equal(y, want) for y, want in zip(ys, plain["mxfp8"]))
    assert torch.equal(dw0, plain["mxfp8"][5])
    # The other linears share the RMS estimate of MXFP8, so their gradients are close to their format's, not equal.
    for got, want in ((dw1, plain["nvfp4"][6]), (dw2, plain["bf16"][7]), (dx, plain["bf16"][3])):
        assert (got - want).norm() < 0.15 * want.norm()
    assert dgain.isfinite().all()


@pytest.mark.parametrize(
    ("names", "signs", "draws"),
    [
        (("nvfp4", "mxfp8", "mxfp8"), False, False),
        (("mxfp8", "nvfp4", "mxfp8"), False, True),
        (("mxfp8", "bf16", "nvfp4"), True, True),
        (("nvfp4", "nvfp4", "bf16"), False, True),
    ],
)
def test_signs_and_random_bits_exist_if_a_gemm_uses_them(names, signs, draws):
    linear, cpu = layer(spec(*names)), torch.device("cpu")
    assert (linear.signs(cpu) is not None, linear.draws(cpu) is not None) == (signs, draws)
    assert (block_of(spec(*names)).norm(draw(T, D, seed=0)).signs is not None) == signs
    off = get_recipe(spec(*names), hadamard=False, stochastic_rounding=False)
    assert layer(off).signs(cpu) is None and layer(off).draws(cpu) is None


def test_a_linear_uses_its_own_signs_if_its_norm_has_none():
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    recipe = spec("mxfp8", "mxfp8", "nvfp4")
    shared, alone = block_of(recipe), block_of(recipe, norm="mxfp8")
    assert alone.norm(x).signs is None
    want, got = results_of(shared, x, dy), results_of(alone, x, dy)
    assert [torch.equal(a, b) for a, b in zip(got, want)] == [True, True, False, False]
    shared.norm.set_seed(SEED, "w0")
    set_rounding_step(5, microbatch=2, rank=1)
    assert all(torch.equal(a, b) for a, b in zip(got, results_of(shared, x, dy)))


@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_one_read_of_the_gradient_for_two_casts_with_one_recipe(name, monkeypatch):
    """A frozen operand needs only one cast."""
    reads = []

    def note(cast):
        def noted(ops, parts, recipe, mode, dims, spec):
            if spec.role == "gradient":
                reads.append((recipe.name, dims))
            return cast(ops, parts, recipe, mode, dims, spec)

        return noted

    for kind in (MXKernelOps, NVFP4Ops):
        monkeypatch.setattr(kind, "cast", note(kind.cast))
    other = "nvfp4" if name == "mxfp8" else "mxfp8"
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    results_of(layer(spec(other, name, name)), x, dy)
    assert reads == [(name, (1, 0))]
    reads.clear()
    results_of(layer(spec(other, name, other)), x, dy)
    assert reads == [(name, (1,)), (other, (0,))]
    reads.clear()
    layer(spec(other, name, other))(x).sum().backward()
    assert reads == [(other, (0,))]


def test_features_are_whole_blocks_of_every_quantized_gemm():
    MXLinear(48, 80, recipe=spec("nvfp4", "nvfp4", "bf16"))
    for names in (("nvfp4", "mxfp8", "nvfp4"), ("nvfp4", "nvfp4", "mxfp8")):
        with pytest.raises(ConfigError, match="in_features = 48 is not a multiple of the block size 32 of recipe 'mx"):
            MXLinear(48, 96, recipe=spec(*names))
        with pytest.raises(ConfigError, match="out_features = 80 is not a multiple of the block size 32"):
            MXNormLinear(96, 80, recipe=spec(*names))
    with pytest.raises(ConfigError, match="in_features = 48 is not a multiple of the block size 32 of recipe 'unq"):
        MXLinear(48, 96, recipe="unquantized")
    MXNorm(48, recipe=spec("nvfp4", "mxfp8", "mxfp8"))
    with pytest.raises(ConfigError, match="dim = 48 is not a multiple of the block size 32 of recipe 'bf16'"):
        MXNorm(48, recipe=spec("bf16", "nvfp4", "nvfp4"))


def test_linears_refuse_a_norm_with_another_recipe_of_fprop():
    normed = MXNorm(D, recipe="mxfp8", mode="reference")(draw(2, D, seed=0))
    MXNormLinear(D, N, recipe=spec("mxfp8", "nvfp4", "bf16"), mode="reference")(normed)
    with pytest.raises(ConfigError, match="has recipe nvfp4/static.* but its input was normalized with recipe mxfp8/"):
        MXNormLinear(D, N, recipe=spec("nvfp4", "mxfp8", "mxfp8"), mode="reference")(normed)
