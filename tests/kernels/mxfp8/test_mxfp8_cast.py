"""The MXFP8 cast along rows, columns or both, with factors, against the reference's cast of the product."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.mxfp8.cast import cast
from tests.support.kernel_checks import (
    DTYPES,
    RECIPES,
    assert_same_results,
    bits,
    check_cast,
    draw,
    gpu_only,
    just_above_scales,
    kernel_tests,
    poisoned_memory,
    ugly,
)

pytestmark = kernel_tests

DIMS = [(1,), (0,), (1, 0)]
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


def test_every_setting_on_ugly_rows():
    for form, rounding, dtype in itertools.product(FORMS, RECIPES, DTYPES):
        check_cast(ugly(43, 160, dtype=dtype), rounding, form, (1, 0))
    for form, dims in itertools.product(FORMS, [(1,), (0,)]):
        check_cast(ugly(43, 160), form=form, dims=dims)


@pytest.mark.parametrize("form", FORMS)
def test_factors_of_ugly_rows(form):
    for which, dtype in itertools.product(FACTORS, DTYPES):
        chosen = factors(which, 43, 160, dtype)
        if "row_factor" in chosen:
            chosen["row_factor"][10:14] = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-100])
        check_cast(ugly(43, 160), form=form, dims=(1, 0), **chosen)
    check_cast(ugly(43, 160), form=form, dims=(0,), **factors("row", 43, 160))


@pytest.mark.parametrize("which", FACTORS)
def test_the_product_is_not_rounded_before_the_cast(which):
    """Hundreds of elements lie next to a rounding boundary, so a product in bf16 would show."""
    check_cast(draw(96, 320, dtype=torch.bfloat16), dims=(1, 0), **factors(which, 96, 320, torch.bfloat16))


def test_products_of_bf16_numbers_have_the_scales_of_fp32_numbers():
    numbers = just_above_scales()
    ones = torch.ones_like(numbers, dtype=torch.bfloat16)
    check_cast(ones, dims=(1, 0), column_factor=numbers[0])
    check_cast(ones.t().contiguous(), dims=(1, 0), row_factor=numbers[0])


@pytest.mark.parametrize("form", FORMS)
def test_an_fp32_matrix_can_be_rounded_to_bf16_first(form):
    for x, which in ((ugly(43, 160), "none"), (draw(96, 160), "both")):
        of_factors = factors(which, *x.shape).values() or (None, None)
        run = lambda x, to_bf16: torch.ops.mxtrain.cast(x, *of_factors, to_bf16, True, True, "rceil", form)  # noqa: B023, E731
        rounded = x.bfloat16()
        assert_same_results(run(x, True), run(rounded, False))
        assert_same_results(run(rounded, True), run(rounded, False))
    assert not torch.equal(bits(run(x, True)[0]), bits(run(x, False)[0]))


def test_every_shape():
    for shape, form in zip([(1, 32), (31, 64), (130, 32), (33, 288)], itertools.cycle(FORMS)):
        check_cast(draw(*shape), form=form, dims=(1, 0))
    for shape, form in zip([(1, 1), (33, 40), (5, 33), (33, 130)], itertools.cycle(FORMS)):
        check_cast(draw(*shape), form=form, dims=(0,), **factors("both", *shape))


@pytest.mark.parametrize("which", ["none", *FACTORS])
def test_an_incomplete_block_is_padded_with_positive_zeros(which):
    """Negative factors must not turn the padding into negative zeros, nor infinite factors into NaN."""
    for rows in (1, 33):
        x, chosen = draw(rows, 64) + 3, factors(which, rows, 64)
        for factor in chosen.values():
            factor.neg_()
        if "column_factor" in chosen:
            chosen["column_factor"][::5] = -float("inf")
        with poisoned_memory():
            codes, _ = cast(x, RECIPES["rceil"], (0,), "codes", **chosen)[0]
        assert codes.shape == (64, -(-rows // 32) * 32)
        # A NaN block has NaN codes throughout. Infinite factors make infinite blocks, whose codes are numbers.
        assert (bits(codes)[:, rows:] == 0).all()


@pytest.mark.parametrize("dims", [(1,), (0,)], ids=str)
def test_padding_of_the_blocked_layout_is_zero(dims):
    """Tensor cores read the padding, so NaN there would spread."""
    x = draw(33, 96) + 3
    with poisoned_memory():
        _, scales = cast(x, RECIPES["rceil"], dims, "blocked")[dims[0]]
    rows, blocks = (33, 3) if dims == (1,) else (96, 2)
    assert scales.shape == (128 * 4,) and scales.dtype == torch.float8_e8m0fnu
    assert (bits(scales) != 0).sum() == rows * blocks and (bits(scales) != 255).all()


@settings(max_examples=15, deadline=None)
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


@gpu_only
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time(form):
    x = draw(4097, 4096)
    run = lambda: [t for result in cast(x, RECIPES["rceil"], (1, 0), form).values() for t in result]  # noqa: E731
    first = run()
    for _ in range(3):
        assert_same_results(run(), first)


def test_compiles_without_a_graph_break(compile_backend):
    """One graph with every form, orientation and factor."""
    calls = list(zip(FORMS, [(1,), (0,), (1, 0)], ["none", "row", "column"]))

    def run(x, *chosen):
        casts = [cast(x + x, RECIPES["rceil"], dims, form, **kwargs) for (form, dims, _), kwargs in zip(calls, chosen)]
        return [t for results in casts for result in results.values() for t in result if t is not None]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (33, 64, 50):  # the row count is symbolic from the second call on
        arguments = draw(rows, 96), *(factors(which, rows, 96) for _, _, which in calls)
        assert_same_results(compiled(*arguments), run(*arguments))


@pytest.mark.parametrize(("form", "along_rows"), [("codes", True), ("blocked", False), ("image", True)])
def test_op_matches_its_schema_and_fake(form, along_rows):
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    for row_factor, column_factor in [(None, None), (draw(33), draw(96))]:
        arguments = (draw(33, 96), row_factor, column_factor, False, along_rows, True, "rceil", form)
        torch.library.opcheck(torch.ops.mxtrain.cast.default, arguments, test_utils=("test_schema", "test_faketensor"))
