"""MXLinear, MXNorm and MXNormLinear under the NVFP4 recipes, against explicit compositions of the reference's casts."""

import math
from itertools import combinations

import pytest
import torch
import torch.nn as nn
from layer_checks import draw
from torch.utils.checkpoint import checkpoint

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear, set_rounding_step
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.recipe import Recipe
from mxtrain.reference import nvfp4
from mxtrain.reference.hadamard import hadamard, pad
from mxtrain.reference.mxnorm import norm_backward
from mxtrain.reference.philox import rounding_bits, rounding_words
from mxtrain.rng.seeds import hadamard_signs, rounding_key

D, N, T = 48, 80, 37
SEED, FQN, NORM = 3, "layers.0.attention.wq", "layers.0.attention_norm"

pytestmark = pytest.mark.usefixtures("device")


@pytest.fixture(autouse=True)
def step():
    set_rounding_step(5, microbatch=2, rank=1)
    yield
    set_rounding_step(None)


def layer(recipe="nvfp4", mode="reference", dtype=torch.float32, bias=False, **switches):
    linear = MXLinear(D, N, bias=bias, recipe=get_recipe(recipe, **switches), mode=mode, dtype=dtype)
    linear.set_seed(SEED, FQN)
    with torch.no_grad():
        for i, parameter in enumerate(linear.parameters()):
            parameter.copy_(draw(*parameter.shape, seed=10 + i, dtype=dtype))
    return linear


def run(linear, x, dy):
    x = x.detach().requires_grad_()
    y = linear(x)
    grads = torch.autograd.grad(y, [x, *linear.parameters()], dy)
    return [y.detach(), *grads]


class Block(nn.Module):
    """One norm that feeds three linears."""

    def __init__(self, recipe="nvfp4", mode="reference", dtype=torch.float32, **norm):
        super().__init__()
        self.norm = MXNorm(D, recipe=recipe, mode=mode, dtype=dtype, **norm)
        self.norm.set_seed(SEED, NORM)
        self.linears = nn.ModuleList(
            MXNormLinear(D, N, bias=False, recipe=recipe, mode=mode, dtype=dtype) for _ in "123"
        )
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(draw(*parameter.shape, seed=10 + i, dtype=dtype))
        for i, linear in enumerate(self.linears):
            linear.set_seed(SEED, f"w{i}")

    def forward(self, x):
        normed = self.norm(x)
        return [linear(normed) for linear in self.linears]


def run_block(block, x, dys):
    x = x.detach().requires_grad_()
    outputs = block(x)
    grads = torch.autograd.grad(outputs, [x, *block.parameters()], dys)
    return [y.detach() for y in outputs] + list(grads)


# The casts of the recipe, in plain formulas.


def values(x, tensor_scale=None, bits=None):
    x = x.float()
    tensor_scale = nvfp4.power_of_two_tensor_scale(x) if tensor_scale is None else tensor_scale
    return nvfp4.image(x, tensor_scale, torch.float32, bits) * tensor_scale


def weight_values(w):
    tensor_scale = nvfp4.power_of_two_tensor_scale(w)
    return nvfp4.image_tiles(w, tensor_scale, torch.float32) * tensor_scale


def along_tokens(x, signs_of):
    return hadamard(pad(x.float(), 0), hadamard_signs(SEED, signs_of), 0).t()


def gradient_values(dy, fqn=FQN, signs_of=FQN, step=5, rank=1, microbatch=2):
    """dY as operand of dgrad, [T, N], and of wgrad, [N, T padded]."""
    for_wgrad = along_tokens(dy, signs_of)
    key, rows = rounding_key(SEED, fqn), for_wgrad.shape[1]
    words = rounding_words(rows, dy.shape[1], key, step, rank, microbatch, dy.device)
    for_dgrad = values(dy, bits=rounding_bits(words, 1)[: dy.shape[0]])
    return for_dgrad, values(for_wgrad, bits=rounding_bits(words, 0).t())


PRECISIONS = [("reference", torch.float32, 1e-6), ("emulated", torch.bfloat16, 4e-3)]


@pytest.mark.parametrize("tokens", [T, 32])
@pytest.mark.parametrize(("mode", "dtype", "tolerance"), PRECISIONS)
def test_linear_is_the_composition_of_casts(mode, dtype, tolerance, tokens):
    linear, x, dy = (
        layer(mode=mode, dtype=dtype),
        draw(tokens, D, seed=0, dtype=dtype),
        draw(tokens, N, seed=1, dtype=dtype),
    )
    w = weight_values(linear.weight.detach().float())
    for_dgrad, for_wgrad = gradient_values(dy)
    expected = [values(x) @ w.t(), for_dgrad @ w, for_wgrad @ values(along_tokens(x, FQN)).t()]
    for got, want in zip(run(linear, x, dy), expected, strict=True):
        assert got.dtype == dtype
        assert (got.float() - want).norm() < tolerance * want.norm()


@pytest.mark.parametrize(("p", "estimator"), [(1, "pre_round"), (2, "pre_round"), (2, "exact")])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_dynamic"])
@pytest.mark.parametrize(("mode", "dtype", "tolerance"), PRECISIONS)
def test_norm_and_linears_are_the_composition_of_casts(mode, dtype, tolerance, recipe, p, estimator):
    block = Block(recipe, mode, dtype, p=p, estimator=estimator)
    x, dys = draw(T, D, seed=0, dtype=dtype), [draw(T, N, seed=s, dtype=dtype) for s in (1, 2, 3)]
    got = run_block(block, x, dys)

    rho = block.norm(x).rho
    xhat = x.float() * rho[:, None]
    tensor_scale = nvfp4.static_tensor_scale(D, p, estimator) if recipe == "nvfp4" else None
    gain = block.norm.weight.detach().float()
    outputs, dxhat, dgain, dweights = [], 0, 0, []
    for i, (linear, dy) in enumerate(zip(block.linears, dys)):
        weight = linear.weight.detach().float()
        folded = weight_values(weight * gain)
        outputs.append(values(xhat, tensor_scale) @ folded.t())
        for_dgrad, for_wgrad = gradient_values(dy, f"w{i}", signs_of=NORM)
        dxhat = dxhat + (for_dgrad @ folded).to(dtype).float()
        d_folded = (for_wgrad @ values(along_tokens(xhat, NORM)).t()).to(dtype).float()
        dweights.append(d_folded * gain)
        dgain = dgain + (weight * d_folded).sum(0)
    expected = [*outputs, norm_backward(dxhat, x, rho), dgain, *dweights]
    for mine, want in zip(got, expected, strict=True):
        assert (mine.float() - want.float()).norm() < max(tolerance * 5, 1e-5) * want.float().norm()


def sqnr(got, exact):
    return 20 * math.log10(exact.double().norm() / (got.double() - exact.double()).norm())


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_dynamic"])
def test_error_against_an_fp32_linear_is_that_of_the_format(recipe, mode):
    """Two operands to nearest, or one of them stochastically, which about doubles that one's error."""
    x, dy = draw(96, D, seed=0), draw(96, N, seed=1)
    linear, exact = layer(recipe, mode), nn.Linear(D, N, bias=False)
    exact.weight.data.copy_(linear.weight.data)
    y, dx, dw = (sqnr(a, b) for a, b in zip(run(linear, x, dy), run(exact, x, dy)))
    assert y > 16 and dx > 14 and dw > 14
    assert max(y, dx, dw) < 22, "it is NVFP4"
    block, plain = Block(recipe, mode), Block(Recipe("exact", None, 16))
    block.norm.weight.data.fill_(1.5), plain.norm.weight.data.fill_(1.5)
    dys = [draw(96, N, seed=s) for s in (1, 2, 3)]
    got, want = run_block(block, x, dys), run_block(plain, x, dys)
    assert all(sqnr(a, b) > 16 for a, b in zip(got[:3], want[:3]))
    assert all(sqnr(a, b) > 13 for a, b in zip(got[3:], want[3:]))


# What each switch changes of: Y, dX, dW.
CHANGES = {
    "weight_tiles": (True, True, False),
    "hadamard": (False, False, True),
    "stochastic_rounding": (False, True, True),
}


@pytest.mark.parametrize("switch", CHANGES)
def test_a_switch_changes_what_it_should_and_nothing_else(switch):
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    on, off = run(layer(), x, dy), run(layer(**{switch: False}), x, dy)
    assert tuple(not torch.equal(a, b) for a, b in zip(on, off)) == CHANGES[switch]
    dys = [draw(T, N, seed=s) for s in (1, 2, 3)]
    on, off = (
        run_block(Block(recipe), x, dys) for recipe in (get_recipe("nvfp4"), get_recipe("nvfp4", **{switch: False}))
    )
    y, dx, dw = CHANGES[switch]
    assert [not torch.equal(a, b) for a, b in zip(on, off)] == [*[y] * 3, dx, dw, *[dw] * 3]


def test_the_tensor_scale_of_the_norm_changes_only_the_forward():
    """And of that only blocks so small that their scale is the smallest there is: tensor scales are powers of two."""
    dys = [draw(T, N, seed=s) for s in (1, 2, 3)]
    x = draw(T, D, seed=0).clamp(-0.5, 0.5)
    x[:, :16] *= 5e-5
    static, dynamic = run_block(Block("nvfp4"), x, dys), run_block(Block("nvfp4_dynamic"), x, dys)
    largest = nvfp4.power_of_two_tensor_scale(x * Block().norm(x).rho[:, None])
    assert nvfp4.static_tensor_scale(D) == 2 * largest, "so that there is something to see"
    assert [torch.equal(a, b) for a, b in zip(static, dynamic)] == [False] * 3 + [True] * 5
    x[:, :16] *= 1e4
    static, dynamic = run_block(Block("nvfp4"), x, dys), run_block(Block("nvfp4_dynamic"), x, dys)
    assert all(torch.equal(a, b) for a, b in zip(static, dynamic))
    assert all(torch.equal(a, b) for a, b in zip(run(layer(), x, dys[0]), run(layer("nvfp4_dynamic"), x, dys[0])))


def test_gradients_differ_by_step_microbatch_rank_seed_and_layer_and_by_nothing_else():
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)

    def gradients(step=5, microbatch=2, rank=1, seed=SEED, fqn=FQN):
        set_rounding_step(step, microbatch, rank)
        linear = layer(hadamard=False)
        linear.set_seed(seed, fqn)
        return run(linear, x, dy)[1:]

    settings = [{}, {"step": 6}, {"microbatch": 3}, {"rank": 0}, {"seed": 4}, {"fqn": "layers.1.attention.wq"}]
    drawn = [gradients(**setting) for setting in settings]
    for one, other in combinations(drawn, 2):
        assert not any(torch.equal(a, b) for a, b in zip(one, other))
    for setting, before in zip(settings, drawn):
        assert all(torch.equal(a, b) for a, b in zip(gradients(**setting), before))


def test_bits_belong_to_the_step_of_the_forward():
    linear, x, dy = layer(), draw(T, D, seed=0).requires_grad_(), draw(T, N, seed=1)
    _, want, _ = run(linear, x, dy)
    y = linear(x)
    set_rounding_step(6)
    (got,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(got, want)


def test_without_a_step_every_forward_has_random_bits_of_its_own():
    linear, x, dy = layer(), draw(T, D, seed=0), draw(T, N, seed=1)
    set_rounding_step(None)
    torch.manual_seed(0)
    first, second = run(linear, x, dy), run(linear, x, dy)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(run(linear, x, dy), first))
    to_nearest = layer(stochastic_rounding=False)
    before = torch.get_rng_state()
    with torch.no_grad():
        linear(x)
    to_nearest(x)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn where nothing is rounded stochastically"


def test_stochastic_rounding_is_unbiased_in_every_gradient():
    """The mean over many steps against what the unrounded gradient gives, but for elements that saturate."""
    linear, x, dy = layer(), draw(T, D, seed=0), draw(T, N, seed=1)
    steps, w = 100, weight_values(linear.weight.detach())

    def clamped(x):
        tensor_scale = nvfp4.power_of_two_tensor_scale(x)
        _, scales = nvfp4.cast(x, tensor_scale)
        limit = 6 * scales.float().repeat_interleave(16, -1) * tensor_scale
        return x.clamp(-limit, limit)

    expected = [clamped(dy) @ w, clamped(along_tokens(dy, FQN)) @ values(along_tokens(x, FQN)).t()]
    drawn = []
    for step in range(steps):
        set_rounding_step(step)
        drawn.append(run(linear, x, dy)[1:])
    for results, want in zip(zip(*drawn), expected):
        results = torch.stack(results).double()
        error, sigma = results.mean(0) - want, results.std(0) / steps**0.5
        assert (sigma > 0).all()
        # Elements of one row or column share rounding errors; the mean of z^2 is 1 whatever they share.
        z = error / sigma
        assert abs(z.square().mean() - 1) < 0.3
        assert (z.abs() < 3).double().mean() > 0.99 and z.abs().max() < 5.5
        single = (results[0] - want).norm() / want.norm()
        assert error.norm() / want.norm() < 2 * single / steps**0.5


@pytest.mark.parametrize("hadamard", [True, False])
def test_tiny_gradients_are_not_lost(hadamard):
    """One large element a block: to nearest, all its neighbours are zero for ever; stochastically, now and then not."""
    dy = torch.full((16, N), 1e-6)
    dy[:, ::16] = 1.0
    linear, x = layer(hadamard=hadamard), draw(16, D, seed=0)
    to_nearest = layer(stochastic_rounding=False, hadamard=hadamard)
    linear.weight.data.copy_(torch.eye(N)[:, :D]), to_nearest.weight.data.copy_(torch.eye(N)[:, :D])
    _, lost, _ = run(to_nearest, x, dy)
    tiny = torch.arange(D) % 16 != 0
    assert not lost[:, tiny].any()
    dy[:, 1::16] = 0.02
    kept = 0
    for step in range(50):
        set_rounding_step(step)
        kept = kept + run(linear, x, dy)[1][:, 1::16] / 50
    assert not run(to_nearest, x, dy)[1][:, 1::16].any()
    assert abs(kept.mean() - 0.02) < 0.005


def test_zero_tokens_and_odd_token_counts():
    for tokens in (0, 1, 15, 16, 17):
        x, dy = draw(tokens, D, seed=0), draw(tokens, N, seed=1)
        y, dx, dw = run(layer(bias=False), x, dy)
        assert y.shape == (tokens, N) and dx.shape == (tokens, D) and dw.shape == (N, D)
        assert dw.isfinite().all() and bool(dw.any()) == (tokens > 0)


def test_zeros_and_a_single_outlier():
    linear = layer()
    assert all(not t.any() for t in run(linear, torch.zeros(T, D), torch.zeros(T, N)))
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    x[3, 7], dy[5, 1] = 1e15, 1e15
    assert all(t.isfinite().all() for t in run(linear, x, dy))
    outputs = run_block(Block(), x, [dy, dy, dy])
    assert all(t.isfinite().all() for t in outputs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_reach_the_results(bad):
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    dy[3, 5] = bad
    _, dx, dw = run(layer(), x, dy)
    assert not dx[3].isfinite().any() and not dw[5].isfinite().any()
    x[2, 9] = bad
    y, _, dw = run(layer(), x, draw(T, N, seed=1))
    assert not y[2].isfinite().any() and not dw[:, 9].isfinite().any()


@pytest.mark.parametrize(
    ("recipe", "mode", "autocast"),
    [("nvfp4", "reference", False), ("nvfp4_dynamic", "emulated", True)],
)
def test_compiles_without_a_graph_break_once_for_all_steps_and_layers(recipe, mode, autocast, compile_backend):
    """As TorchTitan does, block by block with the same code: other steps, keys and signs must not compile anew."""
    dtype = torch.bfloat16 if autocast else torch.float32
    x, dys = draw(T, D, seed=0), [draw(T, N, seed=s, dtype=dtype) for s in (1, 2, 3)]
    blocks = [Block(recipe, mode), Block(recipe, mode)]
    blocks[1].norm.set_seed(SEED, "another norm")
    blocks[1].linears[0].set_seed(SEED, "another linear")
    tolerance = 2e-2 if compile_backend == "inductor" else 1e-6
    with (
        torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16, enabled=autocast),
        torch._dynamo.config.patch(error_on_recompile=True),
    ):
        for step, block in enumerate(blocks):
            set_rounding_step(step, microbatch=step)
            compiled = torch.compile(block, backend=compile_backend, fullgraph=True)
            for got, want in zip(run_block(compiled, x, dys), run_block(block, x, dys), strict=True):
                assert (got - want).norm() <= tolerance * want.norm()


def test_compiled_without_a_step_bits_differ(compile_backend):
    set_rounding_step(None)
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    compiled = torch.compile(layer(), backend=compile_backend, fullgraph=True)
    first, second = run(compiled, x, dy), run(compiled, x, dy)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])


@pytest.mark.parametrize("explicit", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant, explicit):
    block, x, dys = Block(), draw(T, D, seed=0).requires_grad_(), [draw(T, N, seed=s) for s in (1, 2, 3)]
    if not explicit:
        set_rounding_step(None)
    torch.manual_seed(0)
    plain = run_block(block, x, dys)
    torch.manual_seed(0)
    outputs = checkpoint(lambda t: tuple(block(t)), x, use_reentrant=reentrant)
    torch.autograd.backward(outputs, dys)
    for got, want in zip([x.grad, *(p.grad for p in block.parameters())], plain[3:]):
        assert torch.equal(got, want)


def test_frozen_weight_or_input_gets_no_gradient():
    linear, x = layer(), draw(T, D, seed=0)
    linear(x).sum().backward()
    assert x.grad is None and linear.weight.grad is not None
    linear = layer().requires_grad_(False)
    x = x.requires_grad_()
    linear(x).sum().backward()
    assert x.grad is not None and linear.weight.grad is None


def test_layers_describe_themselves():
    text = "recipe=nvfp4/static/weight_tiles/hadamard/stochastic_rounding, mode=reference"
    assert text in repr(layer()) and text in repr(Block().norm)
    assert "recipe=nvfp4_dynamic/dynamic/weight_tiles, mode" in repr(
        layer("nvfp4_dynamic", hadamard=False, stochastic_rounding=False)
    )


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MXLinear(40, 64, recipe="nvfp4"), "in_features = 40 is not a multiple of the block size 16"),
        (lambda: MXNormLinear(64, 72, recipe="nvfp4"), "out_features = 72 is not a multiple"),
        (lambda: MXNorm(40, recipe="nvfp4"), "dim = 40 is not a multiple of the block size 16"),
        (lambda: MXNorm(64, recipe="nvfp4", estimator="post_round"), "estimator = 'post_round' reads rounded block"),
    ],
)
def test_wrong_settings(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_linears_refuse_a_norm_with_other_switches():
    normed = MXNorm(D, recipe=get_recipe("nvfp4", hadamard=False))(draw(2, D, seed=0))
    with pytest.raises(ConfigError, match="but its input was normalized with recipe nvfp4/static/weight_tiles/stoch"):
        MXNormLinear(D, N, recipe="nvfp4")(normed)
