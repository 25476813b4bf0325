"""MXNorm and its cast, in both formats: rho near the reference's, and for the kernel's own rho the reference's bits."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats import mxnorm as reference
from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.mx.norm import NORM as MXFP8_NORM
from mxtrain.formats.mx.norm import mxnorm_cast
from mxtrain.formats.norm_kernel import row_tile
from mxtrain.formats.nvfp4.norm import NORM as NVFP4_NORM
from mxtrain.formats.nvfp4.norm import nvfp4_norm
from mxtrain.launch.launch import INTERPRETED, MAX_PERSISTENT_COLUMNS
from tests.support.kernel_checks import (
    DTYPES,
    OTHER_ELEMENTS,
    RECIPES,
    assert_same_results,
    assert_within_ulps,
    check_mxnorm_cast,
    draw,
    gpu_only,
    kernel_tests,
    rms_estimate,
    ugly,
)
from tests.support.nvfp4_checks import check_norm, estimate_16

pytestmark = kernel_tests

# Rows of more than 16384 elements are read twice.
LOOPED = 20480


ESTIMATE, ESTIMATE_16 = rms_estimate(), estimate_16()


class Format(NamedTuple):
    """What differs: block size, estimates, a check of results, and a call of the kernel with its own settings."""

    block: int
    estimates: list[tuple[int, str]]
    check: Callable
    call: Callable
    op: Callable
    settings: tuple
    """The op's last arguments"""

    def __str__(self):
        return "mxfp8" if self.block == 32 else "nvfp4"


MXFP8 = Format(
    32,
    [(1, "pre_round"), (2, "pre_round"), (1, "post_round"), (2, "post_round"), (1, "exact")],
    check_mxnorm_cast,
    lambda x, form="codes", residual=None, estimate=ESTIMATE: mxnorm_cast(
        x, estimate, RECIPES["rceil"], form, residual
    ),
    MXFP8_NORM,
    ("e4m3", "rceil"),
)
NVFP4 = Format(
    16,
    [(1, "pre_round"), (2, "pre_round"), (1, "exact")],
    check_norm,
    lambda x, form="codes", residual=None, estimate=ESTIMATE_16: nvfp4_norm(x, estimate, 2.0**-8, form, residual),
    NVFP4_NORM,
    (2.0**-8, ""),
)
formats = pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
ESTIMATES = [
    pytest.param(fmt, p, estimator, id=f"{name}-{p}-{estimator}")
    for name, fmt in (("mxfp8", MXFP8), ("nvfp4", NVFP4))
    for p, estimator in fmt.estimates
]


@pytest.mark.parametrize(("fmt", "p", "estimator"), ESTIMATES)
def test_every_setting_on_ugly_rows(fmt, p, estimator):
    columns = 160 if fmt is MXFP8 else 176
    for form, dtype, rounding in zip(FORMS, itertools.cycle(DTYPES), itertools.cycle(RECIPES)):
        own = {"rounding": rounding} if fmt is MXFP8 else {}
        fmt.check(ugly(19, columns, dtype=dtype), form=form, p=p, estimator=estimator, **own)


@pytest.mark.parametrize("element", OTHER_ELEMENTS)
def test_other_elements_on_ugly_rows(element):
    for form, dtype, rounding in zip(FORMS, itertools.cycle(DTYPES), RECIPES):
        check_mxnorm_cast(ugly(19, 96, dtype=dtype), rounding, form, recipe=OTHER_ELEMENTS[element])
    check_mxnorm_cast(ugly(19, 96), form="image", estimator="post_round", recipe=OTHER_ELEMENTS[element])


# One block (for NVFP4 half of MXFP8's), rows of three and five parts, several programs, the longest row in registers,
# and rows read twice.
MXFP8_SHAPES = [(1, 32), (67, 96), (130, 32), (5, 768), (3, 3104), (1, 10240), (1, 16384), (1, 20480)]
NVFP4_SHAPES = [(1, 16), (3, 48), (130, 16), (19, 176), (5, 624), (3, 3088), (1, 16384)]


@formats
def test_every_shape(fmt):
    for shape, form, dtype in zip(
        MXFP8_SHAPES if fmt is MXFP8 else NVFP4_SHAPES, itertools.cycle(reversed(FORMS)), itertools.cycle(DTYPES)
    ):
        fmt.check(draw(*shape, dtype=dtype), form=form)


@formats
def test_images_of_long_rows_with_the_exact_rms(fmt):
    """Two parts, of which the second is not full."""
    columns = 7168 + fmt.block
    x, residual = ugly(11, columns), (ugly if fmt is MXFP8 else draw)(11, columns, seed=1)
    fmt.check(x, form="image", estimator="exact")
    fmt.check(draw(11, columns), form="image", estimator="exact", residual=residual)


@pytest.mark.parametrize(
    ("fmt", "p", "estimator", "form"),
    [
        (MXFP8, 1, "post_round", "blocked"),
        (MXFP8, 2, "exact", "codes"),
        (NVFP4, 2, "exact", "codes"),
        (NVFP4, 1, "pre_round", "image"),
    ],
    ids=str,
)
def test_ugly_rows_that_are_read_twice(fmt, p, estimator, form):
    fmt.check(ugly(8, 16384 + fmt.block)[[2, 5, 7]], form=form, p=p, estimator=estimator)


def check_rho(x, *estimate):
    rho = mxnorm_cast(x, rms_estimate(*estimate), RECIPES["rceil"]).rho
    assert_within_ulps(rho, reference.inverse_rms(x, rms_estimate(*estimate), RECIPES["rceil"]), 2)


@pytest.mark.parametrize(("p", "estimator"), MXFP8.estimates)
def test_rho_of_many_rows(p, estimator):
    for columns in (96,) if INTERPRETED else (32, 96, 768, 4096):
        check_rho(draw(*((8192 if INTERPRETED else 2**22) // columns, columns)), p, estimator)


@pytest.mark.parametrize(("p", "estimator"), MXFP8.estimates)
def test_rho_of_rows_of_equal_numbers(p, estimator):
    """Every term is rounded in the same direction, so errors that cancel elsewhere add up."""
    for columns, rows in ((160, 16), (4128, 2)) if INTERPRETED else ((160, 1024), (4128, 1024), (65536, 1024)):
        check_rho(torch.linspace(1, 4, rows + 1)[1:, None].expand(rows, columns).contiguous(), p, estimator)


@pytest.mark.parametrize(("p", "estimator"), MXFP8.estimates)
def test_rho_of_rows_of_every_size(p, estimator):
    """From 2^-149 to 2^127, no square overflows or underflows."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)
    x = (draw(exponents.numel(), 64).clamp(-1.9, 1.9).double() * torch.exp2(exponents)[:, None]).float()
    for eps in (0.0, 1e-5):
        check_rho(x, p, estimator, eps)


@formats
def test_settings_make_a_difference(fmt):
    """Otherwise a kernel that ignores a setting would pass wherever the reference happens to agree."""
    x = draw(3, 96)
    rhos = [fmt.call(x, "codes", None, RMSEstimate(*setting, 1e-5, fmt.block)).rho for setting in fmt.estimates]
    assert all(not torch.equal(a, b) for i, a in enumerate(rhos) for b in rhos[:i])


@formats
def test_residual(fmt):
    """The kernel normalizes the sum as stored, rounded to the dtype of x."""
    cases = zip(itertools.product(DTYPES, DTYPES), [96, LOOPED, 96, 64], ["codes", "blocked", "image", "image"])
    for (dtype, residual_dtype), columns, form in cases:
        x, residual = draw(3, columns, dtype=dtype), draw(3, columns, seed=1, dtype=residual_dtype) * 2.0**5
        fmt.check(x, form=form, residual=residual)
    fmt.check(draw(96, 19).t(), residual=draw(96, 19, seed=1).t())
    if fmt is MXFP8:
        for estimator in ("pre_round", "exact"):
            fmt.check(ugly(19, 160), residual=ugly(19, 160, seed=1).flip(0), estimator=estimator)


@settings(max_examples=14, deadline=None)
@given(
    fmt=st.sampled_from([MXFP8, NVFP4]),
    shape=st.tuples(st.integers(1, 9), st.integers(1, 40)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-50, 50),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    setting=st.integers(0, 4),
)
def test_any_rows(fmt, shape, seed, log2_scale, dtype, form, setting):
    x = draw(shape[0], fmt.block * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale
    p, estimator = fmt.estimates[setting % len(fmt.estimates)]
    own = {"rounding": list(RECIPES)[seed % 2]} if fmt is MXFP8 else {}
    fmt.check(x, form=form, p=p, estimator=estimator, **own)


@gpu_only
@formats
@pytest.mark.parametrize("shape", [(4096, 96), (512, LOOPED)])
def test_the_same_bits_every_time(fmt, shape):
    x = draw(*shape)
    first = fmt.call(x)
    for _ in range(3):
        assert_same_results(fmt.call(x), first)


@formats
def test_compiles_without_a_graph_break(fmt, compile_backend):
    """One graph, with and without a residual."""

    def run(x, residual):
        x = x + x
        casts = [fmt.call(x, form, other) for form, other in (("codes", residual), ("image", None))]
        return [casts[0].rho * 2, *(t for result in casts for t in result if t is not None)]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (5, 9):  # the row count is symbolic from the second call on
        x, residual = draw(rows, 32, seed=rows), draw(rows, 32, seed=1)
        assert_same_results(compiled(x, residual), run(x, residual))


@formats
def test_op_matches_its_schema_and_fake(fmt):
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    constant = RMSEstimate(2, "pre_round", 1e-5, fmt.block).constant
    for form, residual in (("codes", None), ("image", draw(5, 32, seed=1))):
        arguments = (draw(5, 32), residual, 2, "pre_round", 1e-5, constant, form, *fmt.settings)
        torch.library.opcheck(fmt.op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form):
    for dtype in DTYPES:
        data, scales, rho, total, _ = nvfp4_norm(torch.empty(0, 96, dtype=dtype), estimate_16(), 1.0, form)
        assert data.shape == ((0, 96) if form == "image" else (0, 48)) and rho.shape == (0,) and total is None
        assert scales is None if form == "image" else scales.numel() == 0


@formats
def test_longer_rows_are_refused(fmt):
    with pytest.raises(ValueError, match=r"x has shape \(2, 65568\); .* at most 65536"):
        fmt.call(torch.ones(2, 65536 + 32))


# The tiles, for every row length that registers hold


@pytest.mark.parametrize("estimator", ["pre_round", "post_round", "exact"])
@pytest.mark.parametrize("form", FORMS)
def test_rows_fit_in_registers(form, estimator):
    """Triton's interpreter has no limit on elements per thread."""
    for columns in range(16, MAX_PERSISTENT_COLUMNS + 1, 16):
        persistent, rows, parts, part, warps = row_tile(columns, form, estimator)
        assert persistent and parts in (1, 2, 3, 5) and warps in (1, 2, 4, 8), columns
        assert part % 32 == 0 and part & (part - 1) == 0, columns
        filled = -columns // 32 * -32
        assert columns <= parts * part <= filled * 4 // 3, columns
        assert rows * parts * part <= 112 * 32 * warps, columns
