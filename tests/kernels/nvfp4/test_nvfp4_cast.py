"""The NVFP4 cast along rows and columns: transform, random bits, factors and maxima against the reference's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_same_results, bits, draw, kernel_tests, poisoned_memory, ugly
from nvfp4_checks import KEY, check_cast, draws, signs

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.nvfp4.cast import nvfp4_amax, nvfp4_cast
from mxtrain.reference.nvfp4 import dynamic_tensor_scale, power_of_two_tensor_scale

pytestmark = kernel_tests

DIMS = [(1,), (0,), (1, 0)]
ROUNDINGS = [(), (1,), (0,), (1, 0)]
FACTORS = ["row_factor", "column_factor"]


def factors(which, rows, columns, dtype=torch.float32):
    """A positive row factor, as rho is, and a column factor of both signs with a zero, as a gain can be."""
    chosen = {}
    if "row_factor" in which:
        chosen["row_factor"] = (draw(rows, seed=1).abs() + 0.1).to(dtype)
    if "column_factor" in which:
        chosen["column_factor"] = draw(columns, seed=2, dtype=dtype)
        chosen["column_factor"][1:2] = 0
    return chosen


@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("form", ["blocked", "image"])
@pytest.mark.parametrize("stochastic", ROUNDINGS, ids=str)
@pytest.mark.parametrize("dims", DIMS, ids=str)
def test_every_setting(dims, stochastic, form, transform):
    """Tokens that 16 does not divide; the tensor scales are those of the training recipe."""
    check_cast(draw(19, 48, dtype=torch.bfloat16), dims, form, transform, stochastic)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transform", [False, True])
@pytest.mark.parametrize("form", ["codes", "image"])
@pytest.mark.parametrize("stochastic", [(), (1, 0)], ids=str)
def test_ugly_rows(stochastic, form, transform, dtype):
    """By the dynamic tensor scale, once NaN, and by others, too small for the infinite rows and too large for most."""
    x = ugly(16, 80, dtype=dtype)
    check_cast(x, (1, 0), form, transform, stochastic)
    check_cast(x.nan_to_num(0.0, 3e38, -3e38), (1, 0), form, transform, stochastic)
    scales = {1: torch.tensor(2.0**-20), 0: torch.tensor(2.0**30)}
    check_cast(x, (1, 0), form, transform, stochastic, scales)


def test_denormal_numbers_are_rounded_as_by_the_reference():
    """Products with signs / 16 are not fused into the first sums of the transform."""
    x = draw(64, 64) * 2.0 ** torch.arange(-149, -117).repeat_interleave(2)[:, None]
    scale = torch.tensor(2.0**-121)
    check_cast(x, tensor_scales={1: scale, 0: scale})


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", ["codes", "image"])
@pytest.mark.parametrize("shape", [(1, 16), (15, 32), (17, 272), (64, 112), (3, 768)], ids=str)
def test_every_shape(shape, form, dtype):
    check_cast(draw(*shape, dtype=dtype), form=form)


@pytest.mark.parametrize("factor_dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("which", [FACTORS[:1], FACTORS[1:], FACTORS], ids=str)
def test_factors(which, form, factor_dtype):
    """The product is not rounded before the cast."""
    check_cast(draw(35, 96), form=form, stochastic=(), **factors(which, 35, 96, factor_dtype))


@pytest.mark.parametrize("which", [[], FACTORS[:1], FACTORS[1:], FACTORS], ids=str)
@pytest.mark.parametrize("rows", [1, 15, 17])
def test_without_a_transform_an_incomplete_block_is_filled_up_with_positive_zeros(rows, which):
    """Negative factors must not make negative zeros of them, nor infinite ones NaN."""
    x, chosen = draw(rows, 64) + 3, factors(which, rows, 64)
    for factor in chosen.values():
        factor.neg_()
    if "column_factor" in chosen:
        chosen["column_factor"][::5] = -float("inf")
    with poisoned_memory():
        data, _ = nvfp4_cast(x, {0: torch.tensor(1.0)}, "image", **chosen)[0]
    assert data.shape == (-(-rows // 16) * 16, 64)
    assert (bits(data)[rows:] == 0).all()


def test_padding_of_the_blocked_layout_is_zero():
    """Tensor cores read it: NaN there would spread."""
    x = draw(33, 80) + 3
    with poisoned_memory():
        results = nvfp4_cast(x, {1: torch.tensor(1.0), 0: torch.tensor(1.0)}, "blocked")
    for dim, rows, blocks in ((1, 33, 5), (0, 80, 3)):
        scales = results[dim][1]
        assert scales.shape == (128 * -(-blocks // 4) * 4,) and scales.dtype == torch.float8_e4m3fn
        assert (bits(scales) != 0).sum() == rows * blocks


@settings(max_examples=15, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 33), st.integers(1, 20)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    dims=st.sampled_from(DIMS),
    stochastic=st.sampled_from(ROUNDINGS),
    transform=st.booleans(),
)
def test_any_matrix(shape, seed, log2_scale, dtype, form, dims, stochastic, transform):
    x = draw(shape[0], 16 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale
    check_cast(x, dims, form, transform, stochastic)


def test_every_number_that_bits_follow_from_changes_the_result():
    x, scale = draw(16, 64), torch.tensor(1.0)

    def cast(key=5, step=1, microbatch=2, rank=3):
        return nvfp4_cast(x, {1: scale}, draws=torch.tensor([key, step, microbatch, rank]))[1][0]

    results = [cast(), cast(key=6), cast(key=5 + 2**40), cast(step=2), cast(microbatch=1), cast(rank=0)]
    assert torch.equal(results[0], cast())
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@pytest.mark.parametrize("layout", [lambda t: t.t().contiguous().t(), lambda t: t.repeat(1, 2)[:, : t.shape[1]]])
def test_layouts(layout):
    check_cast(layout(draw(19, 48)), form="image", stochastic=(1,))


@pytest.mark.parametrize("transform", [False, True])
def test_maxima_give_tensor_scales(transform):
    x = draw(70, 272)
    x[-1, -1] = float("inf")
    for matrix in (x[:69], x[:69] * 0, x, torch.full((5, 32), float("nan")), torch.empty(0, 32)):
        amax, transformed = nvfp4_amax(matrix, signs() if transform else None)
        assert_same_results([dynamic_tensor_scale(amax)], [dynamic_tensor_scale(matrix)])
        assert (transformed is not None) == transform


@pytest.mark.parametrize("form", ["codes", "image"])
def test_compiles_once_for_all_layers_and_steps(form, compile_backend):
    """Keys, signs, step and the rest are tensors, so that no value of theirs is in the graph."""

    def run(x, sign, numbers):
        amax, transformed = nvfp4_amax(x, sign)
        scales = {1: power_of_two_tensor_scale(amax), 0: power_of_two_tensor_scale(transformed)}
        results = nvfp4_cast(x, scales, form, signs=sign, draws=numbers)
        return [t for result in results.values() for t in result if t is not None]

    x = draw(17, 64)
    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for step in range(2):
        sign, numbers = torch.tensor(step * 77), torch.tensor([KEY - step, step, step, step])
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            assert_same_results(compiled(x, sign, numbers), run(x, sign, numbers))


@pytest.mark.parametrize("form", FORMS)
def test_custom_ops_keep_their_word(form):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    x, scale = draw(35, 96), torch.tensor(1.0)
    tests = ("test_schema", "test_faketensor")
    for arguments in (
        (x, None, None, scale, scale, signs(), draws(), [1, 0], form),
        (x, draw(35), draw(96), None, scale, None, None, [], form),
    ):
        torch.library.opcheck(torch.ops.mxtrain.nvfp4_cast.default, arguments, test_utils=tests)
    for sign in (None, signs()):
        torch.library.opcheck(torch.ops.mxtrain.nvfp4_amax.default, (x, None, None, sign), test_utils=tests)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 96), (5, 0)], ids=str)
def test_nothing_to_cast(shape, form):
    x, scale = torch.empty(shape), torch.tensor(1.0)
    results = nvfp4_cast(x, {1: scale, 0: scale}, form, signs=signs())
    rows, columns = shape
    if form == "image":
        assert [results[dim][0].shape for dim in (1, 0)] == [(rows, columns), (-(-rows // 16) * 16, columns)]
    else:
        assert [results[dim][0].shape for dim in (1, 0)] == [(rows, columns // 2), (columns, -(-rows // 16) * 8)]
        assert all(results[dim][1].numel() == 0 for dim in (1, 0))


@pytest.mark.parametrize(
    "function", [lambda x: nvfp4_cast(x, {1: torch.tensor(1.0)}), nvfp4_amax], ids=["cast", "amax"]
)
@pytest.mark.parametrize("shape", [(), (96,), (2, 3, 96), (2, 1), (2, 24)], ids=str)
def test_shapes_that_they_do_not_take(shape, function):
    with pytest.raises(ValueError) as error:
        function(torch.ones(shape))
    assert str(tuple(shape)) in str(error.value)


def test_what_else_they_do_not_take():
    x, one = torch.ones(2, 32), torch.tensor(1.0)
    for match, scales, arguments in (
        ("form = 'swizzled'", {1: one}, dict(form="swizzled")),
        ("expected 0, 1 or both", {}, {}),
        ("expected 0, 1 or both", {2: one}, {}),
        (r"tensor_scales\[1\] \(2,\) of torch.float32", {1: torch.ones(2)}, {}),
        (r"tensor_scales\[0\] \(\) of torch.float64", {0: one.double()}, {}),
        (r"draws \(5,\) of torch.int64", {1: one}, dict(draws=torch.ones(5, dtype=torch.int64))),
        (r"draws \(4,\) of torch.float32", {1: one}, dict(draws=torch.ones(4))),
        (r"signs \(16,\) of torch.int64", {0: one}, dict(signs=torch.ones(16, dtype=torch.int64))),
        (r"row_factor \(3,\)", {1: one}, dict(row_factor=torch.ones(3))),
        (r"column_factor \(2,\)", {1: one}, dict(column_factor=torch.ones(2))),
    ):
        with pytest.raises(ValueError, match=match):
            nvfp4_cast(x, scales, **arguments)
    with pytest.raises(ValueError, match="dtype torch.float16 of x"):
        nvfp4_cast(x.half(), {1: one})
