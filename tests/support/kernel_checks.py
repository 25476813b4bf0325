"""Shared by the kernel tests: inputs, and checks that call a kernel and compare its results with the reference."""

import contextlib
from dataclasses import replace

import pytest
import torch

from mxtrain.formats import mxnorm
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hadamard import along_tokens
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.mx.norm import mxnorm_cast
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import RECIPES as NAMED
from mxtrain.formats.recipe import SCALE_ROUNDINGS, Format, Recipe
from mxtrain.launch.launch import INTERPRETED
from mxtrain.norms.mxnorm_backward import fold_backward, norm_backward

RECIPES = {rounding: get_recipe("mxfp8", scale_rounding=rounding) for rounding in SCALE_ROUNDINGS}
OTHER_ELEMENTS = {"e5m2": NAMED["mxfp8_e5m2"].of_gradients, "e2m1": NAMED["mxfp4"]}
DTYPES = [torch.float32, torch.bfloat16]
SMALLEST_NORMAL = 2.0**-126

# Largest relative error. Triton's interpreter truncates fp32 to bf16 where a GPU rounds. It also converts denormal bf16
# numbers wrongly in both directions.
BF16_ROUNDING = 2.0**-7 if INTERPRETED else 2.0**-8
kernel_tests = [
    pytest.mark.usefixtures("device"),
    # In the interpreter NumPy warns about overflow and the like, which these tests provoke.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
gpu_only = pytest.mark.skipif(INTERPRETED, reason="needs a GPU")


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Gaussian numbers, the same on every device."""
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device(), dtype)


def ugly(rows: int, columns: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Blocks of sizes from 2^-40 to 2^40. The first ten rows hold zeros, infinities, NaN, denormals and huge values."""
    generator = torch.Generator("cpu").manual_seed(seed)
    blocks = (rows, -(-columns // 32))
    exponents = torch.randint(-40, 41, blocks, generator=generator, device="cpu").repeat_interleave(32, 1)[:, :columns]
    x = torch.randn(rows, columns, generator=generator, device="cpu") * 2.0**exponents
    middle = columns // 2
    stumbles = [
        lambda row: row.zero_(),
        lambda row: row.zero_().neg_(),
        lambda row: row[:32].zero_(),
        lambda row: row.uniform_(0.5e38, 3.3e38, generator=generator),
        lambda row: row[middle].fill_(float("inf")),
        lambda row: row[-1].fill_(float("nan")),
        lambda row: row[0].fill_(-float("inf")),
        lambda row: row.normal_(0, 2.0**-130, generator=generator),
        lambda row: row.normal_(0, 2.0**-118, generator=generator),
        lambda row: row.fill_(448.0),
    ]
    for row, stumble in zip(x, stumbles):
        stumble(row)
    x = x.to(torch.get_default_device(), dtype)
    if INTERPRETED and dtype == torch.bfloat16:
        x[x.abs() < SMALLEST_NORMAL] = 0
    return x


def just_above_scales() -> torch.Tensor:
    """fp32 [32, T]. Blocks along both dimensions have one number, 1 to 23 above 448 * 2^k.

    torchao 0.18's fp32 logarithm of some of their quotients by 448 rounds to k. No bf16 number is so little above.
    """
    exponents = torch.arange(40, 254, 60)
    numbers = (exponents[:, None] << 23 | 0x600000 + torch.arange(1, 24)).to(torch.int32).view(torch.float32)
    return numbers.flatten().repeat_interleave(32).repeat(32, 1)


def every_second(t):
    wide = torch.full((*t.shape[:-1], 2 * t.shape[-1]), float("nan"), dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


def transposed(t):
    """A transposed matrix, or a column of a matrix for a vector."""
    return t.t().contiguous().t() if t.ndim == 2 else t[:, None].repeat(1, 3)[:, 1]


def sliced_rows(t):
    wide = torch.full((*t.shape[:-1], t.shape[-1] + 8), float("nan"), dtype=t.dtype)
    wide[..., :-8] = t
    return wide[..., :-8]


def misaligned(t):
    """Contiguous, at an address that is no multiple of 16."""
    shifted = torch.empty(t.numel() + 1, dtype=t.dtype)[1:].view(t.shape)
    shifted.copy_(t)
    assert shifted.is_contiguous() and shifted.data_ptr() % 16
    return shifted


LAYOUTS = [every_second, transposed, sliced_rows, misaligned]


@contextlib.contextmanager
def poisoned_memory():
    """Fill allocated memory with NaN (integers: their maximum), which shows where a kernel stores nothing."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[x.element_size()])


def assert_same_bits(got: torch.Tensor, want: torch.Tensor, ignore: torch.Tensor | None = None) -> None:
    """Require the same dtype, shape and bits except where ``ignore`` is true. In bf16 and fp32 all NaN are equal."""
    assert got.dtype == want.dtype and got.shape == want.shape, (got.dtype, got.shape, want.dtype, want.shape)
    assert got.device == want.device and got.is_contiguous()
    wrong = bits(got) != bits(want)
    if got.element_size() > 1:
        wrong &= ~(got.isnan() & want.isnan())
    if ignore is not None:
        wrong &= ~ignore
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        numbers = f"{got[at].float().item()!r}, expected {want[at].float().item()!r}"
        raise AssertionError(f"{wrong.sum().item()} of {wrong.numel()} differ; the first at {at}: {numbers}")


def assert_is_cast(got, x: torch.Tensor, rounding: str, form: str, dim: int = 1, fmt: Format = MXFP8) -> None:
    """Require ``got`` = (data, scales) to be the reference's cast of x (fp32) along ``dim`` in this form."""
    data, scales = got
    padded = torch.nn.functional.pad(x.t(), (0, -x.shape[0] % 32)).contiguous() if dim == 0 else x
    codes, row_major = casts.cast(padded, fmt, rounding)
    if form == "image":
        assert scales is None
        want = casts.image(x, fmt, rounding, dim, torch.float32)
        ignore = (want != 0) & (want.abs() < SMALLEST_NORMAL) if INTERPRETED else None
        assert_same_bits(data, want.bfloat16(), ignore=ignore)
        return
    assert_same_bits(scales, casts.to_blocked(row_major) if form == "blocked" else row_major)
    # The sign of a NaN code differs by processor; four bits have no NaN.
    is_nan = (bits(row_major) == 255).repeat_interleave(4 * fmt.element_bits, 1)
    assert_same_bits(data, codes, ignore=is_nan)


def assert_same_results(got, want) -> None:
    """Require two sequences of tensors (or None) to be equal to the bit."""
    assert len(got) == len(want)
    for one, other in zip(got, want):
        if other is None:
            assert one is None
        else:
            assert_same_bits(one, other)


def assert_within_ulps(got: torch.Tensor, want: torch.Tensor, most: int) -> None:
    """Require non-negative fp32 numbers to be at most ``most`` units in the last place apart; NaN equals NaN."""
    assert got.dtype == want.dtype == torch.float32 and got.shape == want.shape
    distance = (bits(got).long() - bits(want).long()).abs()
    distance = torch.where(got.isnan() & want.isnan(), 0, distance)
    at = int(distance.argmax())
    assert distance[at] <= most, f"{distance[at]} ulp at {at}: {got[at].item()!r}, expected {want[at].item()!r}"


def assert_close(got: torch.Tensor, want: torch.Tensor, error: torch.Tensor) -> None:
    """Require every element within ``error`` of ``want`` (fp64), plus one rounding to bf16 for bf16 results."""
    assert got.shape == want.shape and got.is_contiguous()
    if got.dtype == torch.bfloat16:
        error = error * 1.01 + want.abs() * BF16_ROUNDING * 1.001
    wrong = ~((got.double() - want).abs() <= error)
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        numbers = f"{got[at].item()!r}, expected {want[at].item()!r} within {error[at].item():.2e}"
        raise AssertionError(f"{wrong.sum().item()} of {wrong.numel()} are off; the first at {at}: {numbers}")


def assert_is_sum(total: torch.Tensor, x: torch.Tensor, residual: torch.Tensor) -> None:
    """Require x + residual, rounded to the dtype of x."""
    exact = x.float() + residual.float()
    if INTERPRETED and x.dtype == torch.bfloat16:
        assert total.dtype == x.dtype
        assert_close(total, exact.double(), torch.zeros_like(exact))
    else:
        assert_same_bits(total, exact.to(x.dtype))


def rms_estimate(p: int = 2, estimator: str = "pre_round", eps: float = 1e-5) -> RMSEstimate:
    return RMSEstimate.for_recipe(RECIPES["rceil"], p, estimator, eps)


@contextlib.contextmanager
def careful_call(*inputs: torch.Tensor | None):
    """Poison allocated memory, and require that no input is changed."""
    befores = [None if t is None else t.clone() for t in inputs]
    with poisoned_memory():
        yield
    for now, before in zip(inputs, befores):
        assert now is None or torch.equal(bits(now), bits(before)), "an input was changed"


def check_mxnorm_cast(
    x, rounding="rceil", form="codes", residual=None, recipe: Recipe = RECIPES["rceil"], **estimate
) -> None:
    """Require rho within 2 ulp of the reference, and the exact cast for that rho."""
    estimate, recipe = rms_estimate(**estimate), replace(recipe, scale_rounding=rounding)
    with careful_call(x, residual):
        data, scales, rho, total, _ = mxnorm_cast(x, estimate, recipe, form, residual)
    if residual is None:
        assert total is None
    else:
        assert_is_sum(total, x, residual)
        x = total
    assert_within_ulps(rho, mxnorm.inverse_rms(x, estimate, recipe), 2)
    assert_is_cast((data, scales), mxnorm.scale_rows(x, rho), rounding, form, fmt=recipe.format)


def check_cast(
    x,
    rounding="rceil",
    form="codes",
    dims=(1,),
    row_factor=None,
    column_factor=None,
    recipe: Recipe = RECIPES["rceil"],
    transform=False,
) -> None:
    """Require the reference's bits."""
    recipe = replace(recipe, scale_rounding=rounding)
    with careful_call(x, row_factor, column_factor):
        results = cast(x, recipe, dims, form, row_factor, column_factor, hadamard=transform)
    product = x.float()
    if row_factor is not None:
        product = product * row_factor[:, None]
    if column_factor is not None:
        product = product * column_factor
    assert results.keys() == {*dims}
    for dim, result in results.items():
        values = along_tokens(product, None) if transform and dim == 0 else product
        assert_is_cast(result, values, rounding, form, dim, recipe.format)


def assert_is_norm_backward(dx, g, x, rho) -> None:
    """Require the fp64 reference, within a few fp32 roundings of each term and of the sum over the row."""
    assert dx.dtype == x.dtype
    g, x, rho = g.double(), x.double(), rho.double()
    xhat = x * rho[:, None]
    want = mxnorm.norm_backward(g, x, rho)
    terms = (g.abs() + xhat.abs() * (g * xhat).abs().mean(1, keepdim=True)) * rho.abs()[:, None]
    assert_close(dx, want, terms * 2.0**-20)


def check_norm_backward(g, x, rho) -> None:
    with careful_call(g, x, rho):
        dx = norm_backward(g, x, rho)
    assert_is_norm_backward(dx, g, x, rho)


def check_fold_backward(g, weight, gain) -> None:
    """Require dW to be the product rounded once, and dgain the fp32 sum."""
    with careful_call(g, weight, gain):
        d_weight, d_gain = fold_backward(g, weight, gain)
    assert d_weight.dtype == weight.dtype and d_gain.dtype == gain.dtype
    g, weight, gain = g.double(), weight.double(), gain.double()
    want_weight, want_gain = mxnorm.fold_backward(g, weight, gain)
    assert_close(d_weight, want_weight, want_weight.abs() * 2.0**-24)
    assert_close(d_gain, want_gain, (g * weight).abs().sum(0) * 2.0**-20)
