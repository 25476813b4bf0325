"""Four over six in the casts of matrices, of weights in tiles and of MXNorm's output, against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats import mxnorm
from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.e2m1 import elements, encode
from mxtrain.formats.hadamard import hadamard, pad
from mxtrain.formats.nvfp4 import FOUR_OVER_SIX_RANGE, static_tensor_scale
from mxtrain.formats.nvfp4.cast import nvfp4_cast
from mxtrain.formats.nvfp4.norm import _launch, nvfp4_norm, nvfp4_rows
from mxtrain.formats.nvfp4.reference import cast_four_over_six, largest_magnitude
from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
from tests.support.kernel_checks import DTYPES, draw, kernel_tests, ugly
from tests.support.nvfp4_checks import SIGNS, assert_is_nvfp4, estimate_16, product, signs

pytestmark = kernel_tests


def check_casts(x, form, error="mae", transform=True, amax=None, **factors):
    """Along both dimensions, with the largest magnitudes that the kernel finds unless ``amax`` is given."""
    wide, of = product(x, **factors), signs() if transform else None
    along = {1: wide, 0: pad(wide)}
    if transform:
        along[0] = hadamard(along[0], SIGNS, 0)
    if amax is None:
        found = nvfp4_tensor_scales([x], of, exact=True, **factors)
        want = torch.stack([largest_magnitude(along[dim]) for dim in (1, 0)[: 1 + transform]])[None]
        assert torch.equal(found.nan_to_num(7), want.nan_to_num(7))
    else:
        found = torch.full((1, 2), amax)
    for dim, (data, scales) in nvfp4_cast([x], found, form, signs=of, error=error, **factors).items():
        matrix = along[dim] if dim == 1 else along[dim].t().contiguous()
        want = cast_four_over_six(matrix, found[0, 0 if dim == 1 else -1], error)
        assert_is_nvfp4((data.t() if dim == 0 and form == "image" else data, scales), want, 1.0, form)


def check_weight(w, form, error="mae", gain=None, amax=None):
    wide = product(w, column_factor=gain)
    amax = largest_magnitude(wide) if amax is None else torch.tensor(amax)
    got = nvfp4_weight([w], [amax], form, gain, error=error)
    assert_is_nvfp4(got[1], cast_four_over_six(wide, amax, error, tiles=True), 1.0, form)
    if form != "image":
        transposed = pad(wide).t().contiguous()
        assert_is_nvfp4(got[0], cast_four_over_six(transposed, amax, error, tiles=True), 1.0, form)


def check_norm(x, form, error="mae", **estimate):
    estimate = estimate_16(**estimate)
    scale = static_tensor_scale(x.shape[1], estimate.p, estimate.estimator, top=FOUR_OVER_SIX_RANGE)
    amax = scale * FOUR_OVER_SIX_RANGE
    data, scales, rho, *_ = nvfp4_norm(x, estimate, amax, form, error=error)
    want = cast_four_over_six(mxnorm.scale_rows(x, rho), torch.tensor(amax), error)
    assert_is_nvfp4((data, scales), want, 1.0, form)


def check_rows(x, form, error="mae"):
    """Each row with its own largest magnitude: a norm's output, and rows without a norm."""
    data, scales, rho, _, by_norm = nvfp4_norm(x, estimate_16(), None, form, error=error)
    codes, of_blocks, by_row = nvfp4_rows(x, None, form, error)
    xhat = mxnorm.scale_rows(x, rho)
    for got, matrix, found in (((data, scales), xhat, by_norm), ((codes, of_blocks), x.float(), by_row)):
        amax = matrix.abs().amax(1)
        assert torch.equal(found.nan_to_num(7), amax.nan_to_num(7))
        assert_is_nvfp4(got, cast_four_over_six(matrix, amax.unsqueeze(1), error), 1.0, form)


SWEEP = pytest.mark.sweep


@pytest.mark.parametrize(
    ("form", "error"),
    [
        ("image", "mae"),
        ("codes", "mse"),
        *(pytest.param(*case, marks=SWEEP) for case in (("image", "mse"), ("codes", "mae"), ("blocked", "mae"))),
    ],
)
def test_every_form_and_error(form, error):
    x = draw(19, 144, dtype=torch.bfloat16) * draw(19, 1, seed=1).exp()
    check_casts(x.bfloat16(), form, error)
    check_weight(x, form, error)
    check_norm(x, form, error)
    check_rows(x, form, error)


@pytest.mark.parametrize("dtype", [DTYPES[0], pytest.param(DTYPES[1], marks=SWEEP)], ids=str)
def test_ugly_matrices(dtype):
    """Blocks of every size, with infinities and NaN, under largest magnitudes from zero to the largest."""
    x = ugly(17, 48, dtype=dtype)
    x[16:, 16:32] = 0
    for amax, form in ((None, "codes"), (0.0, "image"), (1e-40, "codes"), (1.0, "image"), (3e38, "blocked")):
        check_casts(x, form, transform=False, amax=amax)
    check_weight(x, "codes")
    check_weight(x, "image", amax=1.0)
    check_norm(x, "codes")
    check_norm(x, "image")
    check_rows(x, "codes")


@pytest.mark.parametrize("error", ["mae", "mse"])
def test_losses_that_only_rounding_tells_apart(error):
    """In exact arithmetic 4 and 6 lose equally much, with true quotients and sums in order one of them loses less."""
    x = torch.randint(-24, 25, (8000, 16), generator=torch.Generator("cpu").manual_seed(0), device="cpu") / 4
    x[:, 0] = 6
    six, four = (x - scale * elements(x.device)[encode(x / scale).int()] for scale in (1, 1.5))
    losses = (six.abs().sum(1), four.abs().sum(1)) if error == "mae" else (six.square().sum(1), four.square().sum(1))
    ties = x[losses[0] == losses[1]][:128].view(32, 64).to(torch.get_default_device())
    for amax in (1000.0, 777.7):
        check_casts(ties * (amax / 1536), "codes", error, transform=False, amax=amax)
        check_casts((ties * (amax / 1536)).t().contiguous(), "image", error, transform=False, amax=amax)
        check_weight(ties * (amax / 1536), "image", error, amax=amax)


def test_elements_just_below_powers_of_two():
    """E2M1's step doubles at 2 and at 4, where elements lose nothing under 6, and much under 4."""
    x = torch.cat([power * (1 - torch.arange(32) * 2.0**-24) for power in (2, -2, 4, -4)]).repeat_interleave(16)
    x[::16] = 6
    check_casts(x.view(-1, 16), "codes", transform=False, amax=1536.0)
    check_casts(x.view(-1, 16).t().contiguous(), "codes", transform=False, amax=1536.0)


@pytest.mark.parametrize("exponent", [-95, -70, 70])
def test_squares_outside_of_fp32s_range(exponent):
    """The reference's are 0 or infinite, and it takes 6."""
    check_casts(draw(32, 64) * 2.0**exponent, "codes", "mse", transform=False)


@SWEEP
def test_factors():
    x = draw(17, 80, dtype=torch.bfloat16)
    rows, columns = draw(17, seed=1).abs() + 0.1, draw(80, seed=2)
    check_casts(x, "image", row_factor=rows)
    check_casts(x, "codes", "mse", transform=False, column_factor=columns)
    check_weight(x, "image", gain=columns)
    for estimate in (dict(p=1), dict(estimator="exact")):
        check_norm(x, "codes", **estimate)


@SWEEP
@settings(max_examples=4, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 10)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    form=st.sampled_from(FORMS),
    error=st.sampled_from(["mae", "mse"]),
)
def test_any_matrix(shape, seed, log2_scale, form, error):
    x = draw(shape[0], 16 * shape[1], seed=seed) * 2.0**log2_scale
    check_casts(x, form, error)
    check_weight(x, form, error)


@pytest.mark.parametrize("columns", [768, 4096, 10240, 12288, 14336, 20480])
def test_threads_hold_few_elements_of_an_image(columns):
    x = torch.empty(2, columns, dtype=torch.bfloat16)
    _, launch = _launch(x, None, 2, "pre_round", 0.0, 1.0, "image", None, "mae")
    of = launch.constants
    elements, threads = 16 * of["ROWS"] * of["PARTS"] * of["BLOCKS"], 32 * of["num_warps"]
    assert elements <= 48 * threads and threads in (32, 64, 128, 256, 512)
