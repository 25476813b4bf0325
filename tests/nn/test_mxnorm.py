"""MXNorm and MXNormLinear against an autograd model in fp64, and against an explicit composition of casts."""

from collections import Counter

import pytest
import torch
import torch.nn as nn
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from layer_checks import draw
from torch._dynamo.backends.common import aot_autograd

from mxtrain import ConfigError, MXNorm, MXNormLinear, mxnorm_cast
from mxtrain.nn.mxnorm import NormedInput
from mxtrain.ops.hardware import runs_kernels
from mxtrain.recipes.formats import MXFP8
from mxtrain.recipes.parse import get_recipe
from mxtrain.recipes.rms_estimate import RMSEstimate
from mxtrain.reference.casts import dequantize, image
from mxtrain.reference.mxnorm import inverse_rms, norm_backward

D, N, TOKENS = 96, 64, (2, 20)

pytestmark = pytest.mark.usefixtures("device")


class Block(nn.Module):
    """One norm that feeds three linears, as attention_norm feeds wq, wk and wv."""

    def __init__(self, recipe="mxfp8", mode="reference", dtype=torch.float32, affine=True, bias=False, **norm):
        super().__init__()
        self.norm = MXNorm(D, elementwise_affine=affine, recipe=recipe, mode=mode, dtype=dtype, **norm)
        self.linears = nn.ModuleList(
            MXNormLinear(D, N, bias=bias, recipe=recipe, mode=mode, dtype=dtype) for _ in range(3)
        )
        with torch.no_grad():
            for i, parameter in enumerate(self.parameters()):
                parameter.copy_(draw(*parameter.shape, seed=10 + i, dtype=dtype))

    def forward(self, x):
        normed = self.norm(x)
        return [linear(normed) for linear in self.linears]


def gradients(block, x, dys):
    x = x.detach().requires_grad_()
    outputs = block(x)
    torch.autograd.backward(outputs, dys)
    grads = [x.grad] + [p.grad for p in block.parameters()]
    block.zero_grad()
    return [y.detach() for y in outputs], grads


def straight_through_model(block, x, dys, estimate):
    """The method's formulas with the casts as identity, differentiated by autograd in fp64.

    The norm's gradient is RMSNorm's with rho for the inverse RMS: rho is given the value of the estimate and the
    derivative -rho^3 x / D that the inverse of sqrt(mean(x^2)) would have there.
    """
    x = x.detach().double().requires_grad_()
    parameters = [p.detach().double().requires_grad_() for p in block.parameters()]
    rho = inverse_rms(x.detach(), estimate, get_recipe("unquantized"))
    mean_square = x.square().mean(-1)
    rho = rho - 0.5 * rho**3 * (mean_square - mean_square.detach())
    xhat = x * rho.unsqueeze(-1)
    gain, weights = (parameters[0], parameters[1:]) if block.norm.weight is not None else (None, parameters)
    outputs = [xhat @ (w if gain is None else w * gain).t() for w in weights]
    torch.autograd.backward(outputs, [dy.double() for dy in dys])
    return outputs, [x.grad] + [p.grad for p in parameters]


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("p", "estimator"), [(1, "pre_round"), (2, "pre_round"), (2, "exact")])
def test_gradients_match_the_fp64_model(p, estimator, affine):
    block = Block("unquantized", dtype=torch.float64, affine=affine, p=p, estimator=estimator)
    x, dys = (
        draw(*TOKENS, D, seed=0, dtype=torch.float64),
        [draw(*TOKENS, N, seed=s, dtype=torch.float64) for s in (1, 2, 3)],
    )
    estimate = RMSEstimate.for_recipe(get_recipe("unquantized"), p, estimator, 1e-5)
    outputs, grads = gradients(block, x, dys)
    expected_outputs, expected = straight_through_model(block, x, dys, estimate)
    for got, want in zip(outputs + grads, expected_outputs + expected):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-9)


def test_with_the_exact_estimator_this_is_rmsnorm_then_linear():
    block = Block("unquantized", dtype=torch.float64, estimator="exact")
    x, dys = (
        draw(*TOKENS, D, seed=0, dtype=torch.float64),
        [draw(*TOKENS, N, seed=s, dtype=torch.float64) for s in (1, 2, 3)],
    )
    _, grads = gradients(block, x, dys)
    reference = nn.ModuleList([nn.RMSNorm(D, eps=1e-5), *(nn.Linear(D, N, bias=False) for _ in range(3))]).double()
    for mine, theirs in zip(block.parameters(), reference.parameters()):
        theirs.data.copy_(mine.data)
    x = x.requires_grad_()
    torch.autograd.backward([linear(reference[0](x)) for linear in reference[1:]], dys)
    # eps is inside rho here and in RMSNorm alike, but RMSNorm's derivative knows it: hence not exact to rounding.
    for got, want in zip(grads, [x.grad] + [p.grad for p in reference.parameters()]):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
@pytest.mark.parametrize(("mode", "dtype"), [("reference", torch.float32), ("emulated", torch.bfloat16)])
def test_forward_and_gradients_match_an_explicit_composition_of_casts(mode, dtype, rounding):
    recipe = get_recipe("mxfp8", rounding)
    block = Block(recipe, mode, dtype=dtype)
    x, dys = draw(*TOKENS, D, seed=0, dtype=dtype), [draw(*TOKENS, N, seed=s, dtype=dtype) for s in (1, 2, 3)]
    outputs, grads = gradients(block, x, dys)

    codes, scales, rho = mxnorm_cast(x.flatten(0, -2), recipe=recipe, eps=1e-5)
    xhat = x.flatten(0, -2).float() * rho[:, None]
    gain = block.norm.weight.detach().float()
    cast = lambda t, dim: image(t, recipe.format, rounding, dim, torch.float32)  # noqa: E731
    dxhat_sum, dgain, expected_outputs, dweights = 0, 0, [], []
    for linear, dy in zip(block.linears, dys):
        weight = linear.weight.detach().float()
        folded, dy = weight * gain, dy.flatten(0, -2).float()
        expected_outputs.append(dequantize(codes, scales, recipe.format) @ cast(folded, 1).t())
        dxhat_sum = dxhat_sum + (cast(dy, 1) @ cast(folded, 0)).to(dtype).float()
        d_folded = (cast(dy, 0).t() @ cast(xhat, 0)).to(dtype).float()
        dweights.append(d_folded * gain)
        dgain = dgain + (weight * d_folded).sum(0)
    dx = norm_backward(dxhat_sum, x.flatten(0, -2), rho).view_as(x)

    # bf16 rounds each result once more, and autograd's partial sums; fp32 differs only by summation order.
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(outputs + grads, [*expected_outputs, dx, dgain, *dweights]):
        error = (got.float().reshape(want.shape) - want.float()).norm() / want.float().norm()
        assert error < tolerance


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("mode", ["reference", "emulated"])
def test_the_norms_operand_is_mxnorm_cast_to_the_bit(mode, dtype):
    """x * rho goes into the cast in fp32: rounded to bf16 before, codes would differ."""
    x = draw(*TOKENS, D, seed=0, dtype=dtype)
    normed = MXNorm(D, mode=mode)(x)
    codes, scales, rho = mxnorm_cast(x, mode=mode)
    assert torch.equal(normed.data.float(), dequantize(codes, scales, MXFP8).flatten(0, -2))
    assert torch.equal(normed.rho, rho.flatten())


def test_low_precision_error_is_that_of_the_casts():
    """Outputs and gradients of MXFP8 stay within a few percent of the unquantized block's, and are not equal."""
    x, dys = draw(*TOKENS, D, seed=0), [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)]
    exact, cast = (gradients(Block(recipe), x, dys) for recipe in ("unquantized", "mxfp8"))
    for got, want in zip(cast[0] + cast[1], exact[0] + exact[1]):
        assert 0.005 < (got - want).norm() / want.norm() < 0.08


def test_gain_gradient_sums_over_three_consumers():
    block, x = Block(), draw(*TOKENS, D, seed=0)
    dys = [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)]
    _, (_, together, *_) = gradients(block, x, dys)
    alone = []
    for i in range(3):
        only = [dy if i == j else torch.zeros_like(dy) for j, dy in enumerate(dys)]
        alone.append(gradients(block, x, only)[1][1])
    assert all(part.norm() > 0 for part in alone)
    torch.testing.assert_close(together, sum(alone), rtol=1e-5, atol=1e-5)


def test_each_gemm_has_blocks_along_its_own_reduction_axis():
    """As for MXLinear: what is not reduced differs in scale by 2^24 between neighbours, and nothing is lost."""
    small = lambda n: torch.where(torch.arange(n) % 2 == 0, 1.0, 2.0**-24)  # noqa: E731
    tokens = 40
    x, w, dy = draw(tokens, D, seed=0), draw(N, D, seed=1), draw(tokens, N, seed=2)

    def run(x, weight, dy, gain):
        norm, linear = MXNorm(D, eps=0.0, mode="reference"), MXNormLinear(D, N, bias=False, mode="reference")
        norm.weight.data.copy_(gain)
        linear.weight.data.copy_(weight)
        normed = norm(x)
        xhat = x * normed.rho[:, None]
        y = linear(normed)
        h_grad, weight_grad = torch.autograd.grad(y, [normed.h, linear.weight], dy)
        return y.detach(), h_grad, weight_grad, xhat

    def check(gemm, got, exact, scale):
        assert ((got - exact) / scale).norm() < 0.1 * (exact / scale).norm(), gemm

    ones = torch.ones(D)
    outputs = small(N)[:, None]
    x = x.requires_grad_()
    y, _, _, xhat = run(x, w * outputs, dy, ones)
    check("fprop", y, xhat.detach() @ (w * outputs).t(), outputs.t())
    # The folded gain scales input features, which dgrad does not reduce over.
    _, dxhat, _, _ = run(x, w, dy * small(tokens)[:, None], small(D))
    check("dgrad", dxhat, (dy * small(tokens)[:, None]) @ (w * small(D)), small(tokens)[:, None] * small(D))
    small_x = (x.detach() * small(D)).requires_grad_()
    _, _, dw, xhat = run(small_x, w, dy * small(N), ones)
    check("wgrad", dw, (dy * small(N)).t() @ xhat.detach(), outputs * small(D))


def test_one_norm_backward_for_all_consumers(monkeypatch):
    import mxtrain.nn.mxnorm as module

    calls = []
    original = module.norm_backward
    monkeypatch.setattr(module, "norm_backward", lambda *args: calls.append(1) or original(*args))
    gradients(Block(), draw(*TOKENS, D, seed=0), [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)])
    assert len(calls) == 1


def test_saved_for_backward_is_x_and_rho():
    """No second tensor of the size of x: besides parameters, only x itself and one number a token are kept."""
    block, x = Block(), draw(*TOKENS, D, seed=0).requires_grad_()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block(x)
    parameters = {p.data_ptr() for p in block.parameters()}
    others = [t for t in saved if t.data_ptr() not in parameters]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in others}
    rho_bytes = TOKENS[0] * TOKENS[1] * 4
    assert sorted(storages.values()) == [rho_bytes, x.untyped_storage().nbytes()]
    assert x.untyped_storage().data_ptr() in storages


def test_zero_row_gives_zeros_and_finite_gradients():
    block, x = Block(), draw(*TOKENS, D, seed=0)
    x[0, 0] = 0
    outputs, grads = gradients(block, x, [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)])
    assert all((y[0, 0] == 0).all() for y in outputs)
    assert all(g.isfinite().all() for g in grads)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_input_reaches_the_output(bad):
    block, x = Block(), draw(*TOKENS, D, seed=0)
    x[1, 3, 7] = bad
    for y in block(x):
        assert not y[1, 3].isfinite().any()
        assert y[0].isfinite().all() and y[1, :3].isfinite().all()


def test_p1_and_p2_differ_and_post_round_differs():
    x = draw(*TOKENS, D, seed=0)
    outputs = [Block(**k)(x)[0] for k in ({"p": 1}, {"p": 2}, {"estimator": "post_round"}, {"estimator": "exact"})]
    assert all(not torch.equal(a, b) for i, a in enumerate(outputs) for b in outputs[:i])


def test_bias():
    block, x = Block(bias=True), draw(*TOKENS, D, seed=0)
    biases = [linear.bias.detach().clone() for linear in block.linears]
    with_bias = [y.detach() for y in block(x)]
    for linear in block.linears:
        linear.bias.data.zero_()
    for got, without, bias in zip(with_bias, block(x), biases):
        torch.testing.assert_close(got, without + bias)
    dys = [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)]
    torch.autograd.backward(block(x), dys)
    for linear, dy in zip(block.linears, dys):
        torch.testing.assert_close(linear.bias.grad, dy.sum((0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize("recipe", ["mxfp8", "unquantized"])
def test_compiles_without_a_graph_break(recipe, mode, autocast, compile_backend):
    block, x = Block(recipe, mode), draw(*TOKENS, D, seed=0)
    dys = [draw(*TOKENS, N, seed=s, dtype=torch.bfloat16 if autocast else torch.float32) for s in (1, 2, 3)]
    device_type = torch.get_default_device().type
    with torch.autocast(device_type, dtype=torch.bfloat16, enabled=autocast):
        eager = gradients(block, x, dys)
        compiled = gradients(torch.compile(block, backend=compile_backend, fullgraph=True), x, dys)
    # Inductor sums in another order, and a code next to a rounding boundary may flip.
    tolerance = 2e-2 if compile_backend == "inductor" else 1e-6
    for got, want in zip(compiled[0] + compiled[1], eager[0] + eager[1]):
        assert (got - want).norm() <= tolerance * want.norm()


def test_compiled_consumers_share_casts(device):
    """x is cast along tokens once for the three weight gradients, and every dY once for both of its GEMMs."""
    if not runs_kernels("emulated", device):
        pytest.skip("no kernels on this device: the casts are not single operations there")
    graphs = []

    def count(graph, _):
        casts = [node.args for node in graph.graph.nodes if node.target is torch.ops.mxtrain.cast.default]
        # (with a row factor, with a column factor, along rows, along columns)
        graphs.append(Counter((a[1] is not None, a[2] is not None, a[3], a[4]) for a in casts))
        return make_boxed_func(graph)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    block = torch.compile(Block(mode="emulated"), backend=backend, fullgraph=True)
    gradients(block, draw(*TOKENS, D, seed=0), [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)])
    weights_along_rows, weights_along_columns = (False, True, True, False), (False, True, False, True)
    x_along_tokens, gradient_both_ways = (True, False, False, True), (False, False, True, True)
    assert graphs == [{weights_along_rows: 3}, {weights_along_columns: 3, x_along_tokens: 1, gradient_both_ways: 3}]


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing_changes_nothing(reentrant):
    block, x = Block(), draw(*TOKENS, D, seed=0)
    dys = [draw(*TOKENS, N, seed=s) for s in (1, 2, 3)]
    _, plain = gradients(block, x, dys)
    x = x.requires_grad_()
    outputs = torch.utils.checkpoint.checkpoint(lambda t: tuple(block(t)), x, use_reentrant=reentrant)
    torch.autograd.backward(outputs, dys)
    for got, want in zip([x.grad] + [p.grad for p in block.parameters()], plain):
        assert torch.equal(got, want)


def test_autocast_gives_its_dtype_and_reads_master_weights_unrounded():
    block, x = Block(), draw(*TOKENS, D, seed=0)
    with torch.autocast(torch.get_default_device().type, dtype=torch.bfloat16):
        outputs = block(x)
    for got, full in zip(outputs, block(x)):
        assert got.dtype == torch.bfloat16
        assert torch.equal(got, full.bfloat16())


def test_modules_keep_parameters_and_describe_themselves():
    norm, linear = nn.RMSNorm(D, eps=1e-3), nn.Linear(D, N)
    new_norm = MXNorm.from_rms_norm(norm, p=1, mode="reference")
    new_linear = MXNormLinear.from_linear(linear, mode="reference")
    assert new_norm.weight is norm.weight and new_norm.eps == 1e-3 and new_norm.estimate.eps == 1e-3
    assert new_linear.weight is linear.weight and new_linear.bias is linear.bias
    assert "p=1, estimator=pre_round, recipe=mxfp8/rceil, mode=reference" in repr(new_norm)
    assert "recipe=mxfp8/rceil, mode=reference" in repr(new_linear)
    assert isinstance(new_norm(draw(2, D, seed=0)), NormedInput)
    assert new_norm(draw(2, 5, D, seed=0)).shape == (2, 5, D)


def test_rms_norm_without_eps_keeps_pytorchs_default():
    assert MXNorm.from_rms_norm(nn.RMSNorm(D), mode="reference").estimate.eps == torch.finfo(torch.float32).eps


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: MXNorm(80), "dim = 80 is not a multiple of the block size 32"),
        (lambda: MXNormLinear(80, 64), "in_features = 80 is not a multiple"),
        (lambda: MXNormLinear(64, 80), "out_features = 80 is not a multiple"),
        (lambda: MXNorm(64, p=4), "p = 4 is not one of"),
        (lambda: MXNorm(64, recipe="int8"), "recipe = 'int8' is not one of"),
        (lambda: MXNorm(64, mode="quick"), "mode = 'quick' is not one of"),
        (lambda: MXNorm.from_rms_norm(nn.RMSNorm((4, 32))), r"normalized_shape = \(4, 32\)"),
    ],
)
def test_wrong_settings(build, message):
    with pytest.raises(ConfigError, match=message):
        build()


def test_a_plain_tensor_is_refused():
    with pytest.raises(TypeError, match="takes the result of an MXNorm, not Tensor"):
        MXNormLinear(D, N)(torch.ones(2, D))


@pytest.mark.parametrize("norm", [{"recipe": "unquantized"}, {"mode": "emulated"}])
def test_a_norm_with_another_recipe_or_mode_is_refused(norm):
    normed = MXNorm(D, **{"mode": "reference", **norm})(draw(2, D, seed=0))
    with pytest.raises(ConfigError, match="but its input was normalized with"):
        MXNormLinear(D, N, mode="reference")(normed)


def test_one_row_and_odd_token_counts():
    block = Block()
    for tokens in ((1,), (1, 1), (3, 11)):
        x, dys = draw(*tokens, D, seed=0), [draw(*tokens, N, seed=s) for s in (1, 2, 3)]
        outputs, grads = gradients(block, x, dys)
        assert outputs[0].shape == (*tokens, N) and grads[0].shape == x.shape
        assert all(g.isfinite().all() and g.norm() > 0 for g in grads)
