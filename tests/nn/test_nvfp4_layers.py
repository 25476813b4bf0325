"""MXLinear, MXNorm and MXNormLinear under the NVFP4 recipes, against explicit compositions of the reference's casts."""

from itertools import combinations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from mxtrain import set_rounding_step
from mxtrain.formats.hadamard import hadamard, pad
from mxtrain.formats.mxnorm import norm_backward
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, static_tensor_scale
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from mxtrain.rng.philox import rounding_bits, rounding_words
from mxtrain.rng.seeds import hadamard_signs, rounding_key
from tests.support.layer_checks import FQN, NORM, SEED, NormBlock, assert_near, draw, mx_linear, results_of

D, N, T = 48, 80, 37

pytestmark = pytest.mark.usefixtures("device", "rounding_step")


def layer(recipe="nvfp4", mode="reference", dtype=torch.float32, **switches):
    return mx_linear(D, N, get_recipe(recipe, **switches), mode, dtype)


def block_of(recipe="nvfp4", mode="reference", linears=3, **kwargs):
    return NormBlock(D, N, *[recipe] * linears, mode=mode, **kwargs)


# The casts of the recipe, in plain formulas.


def values(x, tensor_scale=None, bits=None):
    """tensor_scale: "row" gives each row the scale that it has alone."""
    x = x.float()
    if tensor_scale == "row":
        tensor_scale = torch.stack([nvfp4.power_of_two_tensor_scale(row) for row in x])[:, None]
    tensor_scale = nvfp4.power_of_two_tensor_scale(x) if tensor_scale is None else tensor_scale
    return nvfp4.dequantize(*nvfp4.cast(x, tensor_scale, bits), tensor_scale)


def weight_values(w):
    tensor_scale = nvfp4.power_of_two_tensor_scale(w)
    return nvfp4.dequantize(*nvfp4.cast(w, tensor_scale, tiles=True), tensor_scale)


def along_tokens(x, signs_of):
    return hadamard(pad(x.float()), hadamard_signs(SEED, signs_of), 0).t()


def gradient_values(dy, fqn=FQN, signs_of=FQN, step=5, rank=1, microbatch=2):
    """dY as the operands of dgrad [T, N] and wgrad [N, T padded]."""
    for_wgrad = along_tokens(dy, signs_of)
    key, rows = rounding_key(SEED, fqn), for_wgrad.shape[1]
    words = rounding_words(rows, dy.shape[1], key, step, rank, microbatch, dy.device)
    for_dgrad = values(dy, bits=rounding_bits(words, 1)[: dy.shape[0]])
    return for_dgrad, values(for_wgrad, bits=rounding_bits(words, 0).t())


PRECISIONS = [("reference", torch.float32, 1e-6), ("emulated", torch.bfloat16, 4e-3)]


@pytest.mark.parametrize("recipe", ["nvfp4", "nvfp4_row"])
@pytest.mark.parametrize(("mode", "dtype", "tolerance"), PRECISIONS)
def test_linear_is_the_composition_of_casts(mode, dtype, tolerance, recipe):
    linear = layer(recipe, mode=mode, dtype=dtype)
    w = weight_values(linear.weight.detach().float())
    for tokens in (T, 32) if mode == "reference" else (21,):
        x, dy = draw(tokens, D, seed=0, dtype=dtype), draw(tokens, N, seed=1, dtype=dtype)
        x *= torch.exp2(torch.arange(tokens) % 32 - 16.0)[:, None]
        set_rounding_step(5, microbatch=2, rank=1)
        for_dgrad, for_wgrad = gradient_values(dy)
        expected = [
            values(x, "row" if recipe == "nvfp4_row" else None) @ w.t(),
            for_dgrad @ w,
            for_wgrad @ values(along_tokens(x, FQN)).t(),
        ]
        results = results_of(linear, x, dy)
        assert all(got.dtype == dtype for got in results)
        assert_near(results, expected, tolerance)


def exact_values(x, amax=None):
    """By four over six."""
    x = x.float()
    amax = nvfp4.largest_magnitude(x) if amax is None else amax
    return nvfp4.dequantize(*nvfp4.cast_four_over_six(x, amax), amax / torch.tensor(FOUR_OVER_SIX_RANGE))


@pytest.mark.parametrize(("mode", "dtype", "tolerance"), PRECISIONS)
def test_four_over_six_casts_weights_and_activations(mode, dtype, tolerance):
    recipe, tokens = get_recipe("nvfp4", four_over_six="both", weight_tiles=False), 21
    linear, block = layer(recipe, mode, dtype), block_of(recipe, mode, linears=1, dtype=dtype)
    x, dy = draw(tokens, D, seed=0, dtype=dtype), draw(tokens, N, seed=1, dtype=dtype)
    w = linear.weight.detach().float()
    for_dgrad, for_wgrad = gradient_values(dy, step=5, microbatch=2)
    set_rounding_step(5, microbatch=2, rank=1)
    expected = [exact_values(x) @ exact_values(w).t(), for_dgrad @ exact_values(w.t()).t()]
    expected.append(for_wgrad @ exact_values(along_tokens(x, FQN)).t())
    assert_near(results_of(linear, x, dy), expected, tolerance)
    bound = torch.tensor(static_tensor_scale(D, top=FOUR_OVER_SIX_RANGE) * FOUR_OVER_SIX_RANGE)
    folded = block.linears[0].weight.detach().float() * block.norm.weight.detach().float()
    xhat = x.float() * block.norm(x).rho[:, None]
    assert_near(results_of(block, x, dy)[:1], [exact_values(xhat, bound) @ exact_values(folded).t()], tolerance)
    by_row = block_of(get_recipe(recipe, tensor_scale="row"), mode, linears=1, dtype=dtype)
    wanted = exact_values(xhat, xhat.abs().amax(1, keepdim=True)) @ exact_values(folded).t()
    assert_near(results_of(by_row, x, dy)[:1], [wanted], tolerance)


@pytest.mark.parametrize(
    ("precision", "recipe", "p", "estimator"),
    [
        (0, "nvfp4", 1, "pre_round"),
        (0, "nvfp4", 2, "pre_round"),
        (0, "nvfp4", 2, "exact"),
        (0, "nvfp4_dynamic", 2, "pre_round"),
        (0, "nvfp4_row", 2, "pre_round"),
        (1, "nvfp4", 2, "pre_round"),
        (1, "nvfp4_dynamic", 1, "exact"),
        (1, "nvfp4_row", 2, "exact"),
    ],
)
def test_norm_and_linears_are_the_composition_of_casts(precision, recipe, p, estimator):
    mode, dtype, tolerance = PRECISIONS[precision]
    tokens = T if mode == "reference" else 5
    block = block_of(recipe, mode, linears=2, dtype=dtype, p=p, estimator=estimator)
    x, dys = draw(tokens, D, seed=0, dtype=dtype), [draw(tokens, N, seed=s, dtype=dtype) for s in (1, 2)]
    if recipe == "nvfp4_row":
        x[:, :16] *= 2.0**-13  # blocks of the smallest scale, whose values depend on the row's
    rho = block.norm(x).rho
    xhat = x.float() * rho[:, None]
    tensor_scale = {"nvfp4": static_tensor_scale(D, p, estimator), "nvfp4_row": "row"}.get(recipe)
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
    assert_near(results_of(block, x, *dys), expected, max(tolerance * 5, 1e-5))


@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_scales_of_rows_make_an_operand_independent_of_other_tokens(mode):
    x = draw(T, D, seed=0) * torch.exp2(torch.arange(T) % 32 - 16.0)[:, None]
    x[3, 5], x[4] = float("nan"), 0
    norm, linear = block_of("nvfp4_row", mode).norm, layer("nvfp4_row", mode)
    for cast in (lambda x: norm(x).xhat.data, lambda x: linear.gemms(x.device).quantize_activation(x).data):
        together = cast(x)
        assert together.isnan().all(1).nonzero().flatten().tolist() == [3] and not together[4].any()
        for row in (0, 4, 5, T - 1):
            assert torch.equal(cast(x[row : row + 1])[0], together[row])


# What each switch changes of: Y, dX, dW.
CHANGES = {
    "weight_tiles": (True, True, False),
    "hadamard": (False, False, True),
    "stochastic_rounding": (False, True, True),
}


@pytest.mark.parametrize(
    ("operands", "changes"), [("weights", (True, True, False)), ("activations", (True, False, True))]
)
def test_four_over_six_changes_what_it_should_and_nothing_else(operands, changes):
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    off, on = (results_of(layer(weight_tiles=False, four_over_six=which), x, dy) for which in (False, operands))
    assert tuple(not torch.equal(a, b) for a, b in zip(on, off)) == changes
    other = results_of(layer(weight_tiles=False, four_over_six=operands, four_over_six_error="mse"), x, dy)
    assert tuple(not torch.equal(a, b) for a, b in zip(on, other)) == changes


@pytest.mark.parametrize("switch", CHANGES)
def test_a_switch_changes_what_it_should_and_nothing_else(switch):
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    on, off = results_of(layer(), x, dy), results_of(layer(**{switch: False}), x, dy)
    assert tuple(not torch.equal(a, b) for a, b in zip(on, off)) == CHANGES[switch]
    dys = [draw(T, N, seed=s) for s in (1, 2, 3)]
    recipes = get_recipe("nvfp4"), get_recipe("nvfp4", **{switch: False})
    on, off = (results_of(block_of(recipe), x, *dys) for recipe in recipes)
    y, dx, dw = CHANGES[switch]
    assert [not torch.equal(a, b) for a, b in zip(on, off)] == [*[y] * 3, dx, dw, *[dw] * 3]


def test_the_tensor_scale_of_the_norm_changes_only_the_forward():
    """It changes only blocks so small that they get the smallest block scale: tensor scales are powers of two."""
    dys = [draw(T, N, seed=s) for s in (1, 2, 3)]
    x = draw(T, D, seed=0).clamp(-0.5, 0.5)
    x[:, :16] *= 5e-5
    static, dynamic = results_of(block_of("nvfp4"), x, *dys), results_of(block_of("nvfp4_dynamic"), x, *dys)
    largest = nvfp4.power_of_two_tensor_scale(x * block_of().norm(x).rho[:, None])
    assert static_tensor_scale(D) == 2 * largest, "otherwise both recipes cast alike"
    assert [torch.equal(a, b) for a, b in zip(static, dynamic)] == [False] * 3 + [True] * 5
    x[:, :16] *= 1e4
    static, dynamic = results_of(block_of("nvfp4"), x, *dys), results_of(block_of("nvfp4_dynamic"), x, *dys)
    assert all(torch.equal(a, b) for a, b in zip(static, dynamic))
    static, dynamic = results_of(layer(), x, dys[0]), results_of(layer("nvfp4_dynamic"), x, dys[0])
    assert all(torch.equal(a, b) for a, b in zip(static, dynamic)), "a linear without a norm has no static scale"


def test_gradients_differ_by_step_microbatch_rank_seed_and_layer_and_by_nothing_else():
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)

    def gradients(step=5, microbatch=2, rank=1, seed=SEED, fqn=FQN):
        set_rounding_step(step, microbatch, rank)
        linear = layer(hadamard=False)
        linear.set_seed(seed, fqn)
        return results_of(linear, x, dy)[1:]

    settings = [{}, {"step": 6}, {"microbatch": 3}, {"rank": 0}, {"seed": 4}, {"fqn": "layers.1.attention.wq"}]
    drawn = [gradients(**setting) for setting in settings]
    for one, other in combinations(drawn, 2):
        assert not any(torch.equal(a, b) for a, b in zip(one, other))
    for setting, before in zip(settings, drawn):
        assert all(torch.equal(a, b) for a, b in zip(gradients(**setting), before))


def test_bits_belong_to_the_step_of_the_forward():
    linear, x, dy = layer(), draw(T, D, seed=0).requires_grad_(), draw(T, N, seed=1)
    _, want, _ = results_of(linear, x, dy)
    set_rounding_step(5, microbatch=2, rank=1)
    y = linear(x)
    set_rounding_step(6)
    (got,) = torch.autograd.grad(y, x, dy)
    assert torch.equal(got, want)


def test_without_a_step_every_forward_draws_new_bits():
    linear, x, dy = layer(), draw(T, D, seed=0), draw(T, N, seed=1)
    set_rounding_step(None)
    torch.manual_seed(0)
    first, second = results_of(linear, x, dy), results_of(linear, x, dy)
    assert torch.equal(first[0], second[0]) and not torch.equal(first[1], second[1])
    torch.manual_seed(0)
    assert all(torch.equal(a, b) for a, b in zip(results_of(linear, x, dy), first))
    to_nearest = layer(stochastic_rounding=False)
    before = torch.get_rng_state()
    with torch.no_grad():
        linear(x)
    to_nearest(x)
    assert torch.equal(torch.get_rng_state(), before), "nothing is drawn where nothing is rounded stochastically"


def test_zero_tokens_and_odd_token_counts():
    for tokens in (0, 1, 15, 16, 17):
        x, dy = draw(tokens, D, seed=0), draw(tokens, N, seed=1)
        y, dx, dw = results_of(layer(), x, dy)
        assert y.shape == (tokens, N) and dx.shape == (tokens, D) and dw.shape == (N, D)
        assert dw.isfinite().all() and bool(dw.any()) == (tokens > 0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_values_reach_the_results(bad):
    x, dy = draw(T, D, seed=0), draw(T, N, seed=1)
    dy[3, 5] = bad
    _, dx, dw = results_of(layer(), x, dy)
    assert not dx[3].isfinite().any() and not dw[5].isfinite().any()
    x[2, 9] = bad
    y, _, dw = results_of(layer(), x, draw(T, N, seed=1))
    assert not y[2].isfinite().any() and not dw[:, 9].isfinite().any()


@pytest.mark.parametrize("explicit", [True, False], ids=["step", "no step"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant, explicit):
    block, x, dys = block_of(), draw(T, D, seed=0).requires_grad_(), [draw(T, N, seed=s) for s in (1, 2, 3)]

    def start():
        set_rounding_step(6 if explicit else None)
        torch.manual_seed(0)

    start()
    plain = results_of(block, x, *dys)
    start()
    outputs = checkpoint(lambda t: tuple(block(t)), x, use_reentrant=reentrant)
    torch.autograd.backward(outputs, dys)
    for got, want in zip([x.grad, *(p.grad for p in block.parameters())], plain[3:]):
        assert torch.equal(got, want)
