"""LayerNorm by kernel against the formula in fp64, element by element. RMSNorm's tests cover the shared code."""

import pytest
import torch
import torch.nn.functional as F

from mxtrain.kernels.norm.layer_norm import layer_norm, layer_norm_by_plan
from mxtrain.kernels.norm.rms_norm_plan import LAYER_FORWARD, Plan, choose_forward
from mxtrain.reference import layer_norm as reference
from tests.support.kernel_checks import LAYOUTS, assert_same_results, careful_call, draw, gpu_only, kernel_tests
from tests.support.layer_norm_checks import EPS, assert_is_layer_norm, forward_inputs
from tests.support.rms_norm_checks import WIDTHS, by_plan

pytestmark = kernel_tests

FP32 = torch.float32
# Rows of 100 elements: held whole, and read twice in chunks, the last of which is cut off.
HELD, CHUNKED = Plan(True, 4, 128, 1, 1, 3), Plan(False, 4, 32, 1, 1, 3)
VARIANTS = pytest.mark.parametrize("plan", [HELD, CHUNKED], ids=["held", "chunked"])


def run(plan, x, weight=None, bias=None, residual=None, eps=EPS):
    """(y, mean, rstd, total) by a plan."""
    y, rstd, mean, *total = by_plan(layer_norm_by_plan, (x, residual, weight, bias, eps), plan)
    return y, mean, rstd, total[0] if total else x


def check(plan, x, weight=None, bias=None, residual=None, eps=EPS):
    results = run(plan, x, weight, bias, residual, eps)
    assert_is_layer_norm(results, x, weight, bias, residual, eps)
    return results


def check_chosen(x, weight, bias, residual):
    with careful_call(x, weight, bias, residual):
        results = layer_norm(x, weight, bias, EPS, residual)
    assert_is_layer_norm(results, x, weight, bias, residual)


@VARIANTS
def test_every_dtype_with_and_without_weight_bias_and_residual(plan):
    """Rows and columns are cut off."""
    bf16, fp16 = torch.bfloat16, torch.float16
    for dtypes in (
        (FP32, None, None, None),
        (bf16, FP32, None, fp16),
        (fp16, None, bf16, FP32),
        (FP32, fp16, FP32, bf16),
        (bf16, bf16, fp16, bf16),
    ):
        check(plan, *forward_inputs(5, 100, *dtypes))


@pytest.mark.parametrize("columns", [1, 31, 16400, *(pytest.param(n, marks=pytest.mark.sweep) for n in WIDTHS), 65536])
def test_every_width(columns):
    check_chosen(*forward_inputs(2, columns, FP32, FP32, torch.float16, torch.float16 if columns < 99 else None))


@VARIANTS
def test_nothing_is_cut_off(plan):
    check(plan, *forward_inputs(8, 128, FP32, FP32, FP32))


@VARIANTS
def test_a_large_mean_costs_the_variance_no_digits(plan):
    """mean(x^2) - mean(x)^2 would lose all digits: at a mean of 3e4 its error is larger than the variance, 1."""
    for dtype, mean in ((FP32, 1e3), (FP32, -3e4), (torch.float16, 1e3)):
        x = (draw(9, 100) + mean).to(dtype)
        _, _, rstd, _ = check(plan, x, draw(100, seed=1))
        want = 1 / (x.double().var(1, correction=0) + EPS).sqrt()
        torch.testing.assert_close(rstd.double(), want, rtol=5e-7, atol=0)


@VARIANTS
def test_a_row_of_equal_numbers_becomes_the_bias(plan):
    """1 / sqrt(eps) multiplies the rounding error of the mean, unless this error cancels."""
    x = torch.tensor([0.0, 1000.1, -0.3, 7.7e8, 1e-30]).repeat_interleave(100).view(5, 100)
    y, mean, rstd, _ = run(plan, x, draw(100), draw(100, seed=1), eps=1e-8)
    assert_same_results((y, mean), (draw(100, seed=1).expand(5, 100).contiguous(), x[:, 0].contiguous()))
    variance = 1 / rstd.double() ** 2 - 1e-8
    # A GPU's mean may be off by one ulp, whose squares cancel to their rounding error.
    rounding = 2.0**-24 * (2.0**-23 * x[:, 0].double()) ** 2 if x.is_cuda else 0
    assert (variance.abs() <= 1e-14 + rounding).all()


@VARIANTS
def test_outliers_and_heavy_tails(plan):
    x = draw(9, 100)
    x[0, 0], x[1, 50], x[2, 99] = 1e4, -1e4, 1e6
    x[3:6] /= torch.linspace(1e-3, 1, 100) ** 2
    x[6], x[7], x[8] = x[6] * 1e15, x[7] * 1e-15, x[8] * 1e-30
    check(plan, x, draw(100, seed=1), draw(100, seed=2))


@VARIANTS
def test_what_is_not_finite_stays_in_its_row(plan):
    """Squares of 1e30 overflow, and rstd is 0, as in PyTorch."""
    x, weight, bias, _ = forward_inputs(9, 100, FP32, FP32, FP32)
    clean = run(plan, x, weight, bias)
    x[2, 0], x[4, 99], x[5] = float("nan"), -float("inf"), x[5] * 1e30
    y, mean, rstd, _ = run(plan, x, weight, bias)
    assert y[[2, 4]].isnan().all() and rstd[2].isnan() and rstd[5] == 0
    assert_same_results([y[5]], [bias])
    others = [0, 1, 3, 6, 7, 8]
    assert_same_results([each[others] for each in (y, mean, rstd)], [each[others] for each in clean[:3]])


@VARIANTS
def test_the_largest_rows_as_in_the_reference(plan):
    """The documented limits: 1e18 for rows of 100, then the bias, then NaN."""
    weight, bias, sign = draw(100, seed=1), draw(100, seed=2), torch.arange(100) % 2 * 2.0 - 1
    x = torch.stack([1e18 * sign, 1e20 * sign, 1e36 * sign, 3e38 * sign.clamp(min=0)])
    y, mean, rstd, _ = run(plan, x, weight, bias)
    expected = reference.layer_norm(x, weight, bias, EPS)
    for got, want in zip((y, mean, rstd), expected):
        torch.testing.assert_close(got[:3], want[:3], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(y[0], sign * weight + bias, rtol=1e-6, atol=1e-6)
    assert_same_results([y[1], y[2]], [bias, bias])
    assert y[3].isnan().all() and expected[0][3].isnan().all() and (rstd[1:3] == 0).all()


@VARIANTS
def test_the_same_bits_every_time(plan):
    arguments = forward_inputs(5, 100, *[torch.bfloat16] * 4)
    assert_same_results(run(plan, *arguments), run(plan, *arguments))


@pytest.mark.sweep
@pytest.mark.parametrize("dtype", [FP32, torch.float16, pytest.param(torch.bfloat16, marks=gpu_only)], ids=str)
def test_no_larger_an_error_than_torchs(dtype):
    x, weight, bias, _ = forward_inputs(60, 96, dtype, dtype, dtype)
    want = F.layer_norm(x.double(), (96,), weight.double(), bias.double(), EPS)
    ours, torchs = (
        (y.double() - want).square().mean().sqrt()
        for y in (layer_norm(x, weight, bias, EPS)[0], F.layer_norm(x, (96,), weight, bias, EPS))
    )
    assert ours <= 1.05 * torchs


def test_layouts_and_no_rows():
    for layout, argument in zip(LAYOUTS, (0, 2, 3, 1)):
        arguments = list(forward_inputs(3, 96, *[torch.float16] * 4))
        arguments[argument] = layout(arguments[argument])
        check_chosen(*arguments)
    y, mean, rstd, total = layer_norm(*forward_inputs(0, 96, torch.bfloat16, FP32, FP32)[:3], EPS)
    assert y.shape == total.shape == (0, 96) and y.dtype == torch.bfloat16 and mean.shape == rstd.shape == (0,)


def test_the_plan_is_layer_norms_own(monkeypatch):
    asked = []
    monkeypatch.setattr(
        "mxtrain.kernels.norm.rms_norm.choose_forward", lambda *args: asked.append(args[4]) or choose_forward(*args)
    )
    layer_norm_by_plan(draw(9, 100), None, None, None, EPS)
    assert asked == [LAYER_FORWARD]


def test_bad_input(device):
    x, wrong = torch.ones(6, 96), torch.ones(95)
    for arguments, message in (
        ((x, None, wrong), r"bias \(95,\) of torch.float32: expected \(96,\)"),
        ((x, wrong, None), r"weight \(95,\) of torch.float32: expected \(96,\)"),
        ((torch.ones(2, 65537), None, None), r"x \(2, 65537\): expected rows of 1 to 65536 elements"),
    ):
        with pytest.raises(ValueError, match=message):
            layer_norm(*arguments, EPS)


@pytest.mark.sweep
def test_compiles_without_a_graph_break_for_any_number_of_rows(compile_backend):
    def run(x, weight, bias):
        y, mean, rstd, _ = layer_norm(x + x, weight, bias, EPS)
        return y * 2, mean * 2, rstd * 2

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (2, 3, 5):  # from the second call on the number of rows is symbolic
        with torch.compiler.set_stance("fail_on_recompile" if rows == 5 else "default"):
            arguments = forward_inputs(rows, 96, FP32, FP32, FP32)[:3]
            assert_same_results(compiled(*arguments), run(*arguments))


def test_custom_op_keeps_its_word():
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    x, weight, bias, residual = forward_inputs(2, 96, torch.bfloat16, FP32, FP32, FP32)
    torch.library.opcheck(
        torch.ops.mxtrain.layer_norm.default,
        (x, residual, weight, bias, EPS),
        test_utils=("test_schema", "test_faketensor"),
    )
