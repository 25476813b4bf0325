"""The cast along rows, columns or both, with factors, against the reference's cast of the product."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import (
    DTYPES,
    RECIPES,
    assert_same_results,
    bits,
    check_cast,
    draw,
    kernel_tests,
    poisoned_memory,
    ugly,
)

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.mxfp8.cast import cast

pytestmark = kernel_tests

DIMS = [(1,), (0,), (0, 1), (1, 0)]
FACTORS = ["row", "column", "both"]


def factors(which, rows, columns, dtype=torch.float32):
    """A positive row factor, as rho is, and a column factor of both signs with a zero, as a gain can be."""
    chosen = {}
    if which in ("row", "both"):
        chosen["row_factor"] = (draw(rows, seed=1).abs() + 0.1).to(dtype)
    if which in ("column", "both"):
        chosen["column_factor"] = draw(columns, seed=2, dtype=dtype)
        chosen["column_factor"][1:2] = 0
    return chosen


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rounding", RECIPES)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_setting_on_ugly_rows(dims, rounding, form, dtype):
    check_cast(ugly(43, 160, dtype=dtype), rounding, form, dims)


@pytest.mark.parametrize("factor_dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", FACTORS)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_factors(dims, which, form, factor_dtype):
    check_cast(draw(43, 96), form=form, dims=dims, **factors(which, 43, 96, factor_dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", FACTORS)
def test_the_product_is_not_rounded_before_the_cast(which, dtype):
    """Hundreds of elements lie next to a rounding boundary: a product in bf16 would show."""
    check_cast(draw(96, 320, dtype=dtype), dims=(0, 1), **factors(which, 96, 320, dtype))


@pytest.mark.parametrize("which", FACTORS)
@pytest.mark.parametrize("form", FORMS)
def test_factors_of_ugly_rows(form, which):
    x = ugly(43, 160)
    chosen = factors(which, *x.shape)
    if "row_factor" in chosen:
        chosen["row_factor"][10:14] = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-100])
    check_cast(x, form=form, dims=(0, 1), **chosen)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "shape", [(1, 32), (32, 32), (31, 64), (33, 128), (64, 160), (130, 96), (3, 768), (260, 32)], ids=str
)
def test_every_shape(shape, form):
    check_cast(draw(*shape), form=form, dims=(1, 0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 1), (32, 7), (33, 40), (64, 129), (5, 33), (130, 130)], ids=str)
def test_any_row_length_along_columns(shape, form):
    check_cast(draw(*shape), form=form, dims=(0,), **factors("both", *shape))


@pytest.mark.parametrize("which", ["none", *FACTORS])
@pytest.mark.parametrize("rows", [1, 31, 33, 63])
def test_an_incomplete_block_is_filled_up_with_positive_zeros(rows, which):
    """Negative factors must not make negative zeros of them, nor infinite ones NaN."""
    x, chosen = draw(rows, 64) + 3, factors(which, rows, 64)
    for factor in chosen.values():
        factor.neg_()
    if "column_factor" in chosen:
        chosen["column_factor"][::5] = -float("inf")
    with poisoned_memory():
        ((codes, _),) = cast(x, RECIPES["rceil"], (0,), "codes", **chosen)
    assert codes.shape == (64, -(-rows // 32) * 32)
    # A NaN block has NaN codes throughout; infinite factors make infinite blocks, whose codes are numbers.
    assert (bits(codes)[:, rows:] == 0).all()


@pytest.mark.parametrize("dims", [(1,), (0,)], ids=str)
def test_padding_of_the_blocked_layout_is_zero(dims):
    """Tensor cores read it: NaN there would spread."""
    x = draw(33, 96) + 3
    with poisoned_memory():
        ((_, scales),) = cast(x, RECIPES["rceil"], dims, "blocked")
    rows, blocks = (33, 3) if dims == (1,) else (96, 2)
    assert scales.shape == (128 * 4,) and scales.dtype == torch.float8_e8m0fnu
    assert (bits(scales) != 0).sum() == rows * blocks and (bits(scales) != 255).all()


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 80), st.integers(1, 5)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    rounding=st.sampled_from(list(RECIPES)),
    dims=st.sampled_from(DIMS),
    which=st.sampled_from(["none", *FACTORS]),
)
def test_any_matrix(shape, seed, log2_scale, dtype, form, rounding, dims, which):
    rows, columns = shape[0], 32 * shape[1]
    x = draw(rows, columns, seed=seed, dtype=dtype) * 2.0**log2_scale
    check_cast(x, rounding, form, dims, **factors(which, rows, columns))


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time(form):
    x = draw(*(65, 160) if INTERPRETED else (4097, 4096))
    run = lambda: [t for result in cast(x, RECIPES["rceil"], (0, 1), form) for t in result]  # noqa: E731
    first = run()
    for _ in range(3):
        assert_same_results(run(), first)


@pytest.mark.parametrize(("dims", "which"), [((1,), "none"), ((0,), "row"), ((0, 1), "column")], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_graph_break(form, dims, which, compile_backend):
    def run(x, chosen):
        results = cast(x + x, RECIPES["rceil"], dims, form, **chosen)
        return [t for result in results for t in result if t is not None]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (33, 64, 70):  # from the second on the row count is symbolic
        x, chosen = draw(rows, 96), factors(which, rows, 96)
        assert_same_results(compiled(x, chosen), run(x, chosen))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("along_rows", "along_columns"), [(True, False), (False, True), (True, True)])
def test_custom_op_keeps_its_word(along_rows, along_columns, form):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for row_factor, column_factor in [(None, None), (draw(33), draw(96))]:
        arguments = (draw(33, 96), row_factor, column_factor, along_rows, along_columns, "rceil", form)
        torch.library.opcheck(torch.ops.mxtrain.cast.default, arguments, test_utils=("test_schema", "test_faketensor"))
