"""The NVFP4 cast along rows and columns, with transform, random bits, factors and maxima, against the reference."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.nvfp4.cast import nvfp4_amax, nvfp4_cast
from mxtrain.kernels.nvfp4.tensor_scale import nvfp4_tensor_scale
from mxtrain.reference.nvfp4 import dynamic_tensor_scale
from tests.support.kernel_checks import DTYPES, assert_same_results, bits, draw, kernel_tests, poisoned_memory, ugly
from tests.support.nvfp4_checks import KEY, check_cast, draws, signs

pytestmark = kernel_tests

DIMS = [(1,), (0,), (1, 0)]
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


# Every value of each setting, and every pair of values that share code.
SETTINGS = [
    dict(dims=(1, 0), stochastic=False, transform=False, form="codes", which=[]),
    dict(dims=(1, 0), stochastic=True, transform=True, form="codes", which=[]),
    dict(dims=(1, 0), stochastic=True, transform=True, form="image", which=FACTORS[:1]),
    dict(dims=(1, 0), stochastic=True, transform=False, form="blocked", which=FACTORS),
    dict(dims=(1, 0), stochastic=False, transform=True, form="image", which=FACTORS[1:]),
    dict(dims=(1, 0), stochastic=True, transform=False, form="image", which=[]),
    dict(dims=(0,), stochastic=False, transform=True, form="blocked", which=FACTORS[:1]),
    dict(dims=(0,), stochastic=True, transform=False, form="codes", which=[]),
    dict(dims=(1,), stochastic=True, transform=False, form="image", which=[]),
    dict(dims=(1,), stochastic=False, transform=True, form="blocked", which=FACTORS[1:]),
]


@pytest.mark.parametrize(("setting", "dtype"), list(zip(SETTINGS, itertools.cycle(DTYPES))))
def test_every_setting_on_ugly_rows(setting, dtype):
    """19 rows and 48 columns cut a tile in both directions.

    Finite rows take the dynamic tensor scale. Rows with infinities and NaN take fixed scales, too small for the
    infinite rows and too large for most others.
    """
    setting = dict(setting)
    x, chosen = ugly(19, 48, dtype=dtype), factors(setting.pop("which"), 19, 48, dtype)
    check_cast(x.nan_to_num(0.0, 3e38, -3e38), **setting, **chosen)
    scales = {1: torch.tensor(2.0**-20), 0: torch.tensor(2.0**30)}
    check_cast(x, tensor_scales=scales, **setting, **chosen)


def test_a_nan_makes_the_dynamic_tensor_scale_nan():
    check_cast(ugly(16, 48))


def test_denormals_are_rounded_as_in_the_reference():
    """Products with signs / 16 are not fused into the first sums of the transform."""
    x = draw(32, 64) * 2.0 ** torch.arange(-149, -117)[:, None]
    scale = torch.tensor(2.0**-121)
    check_cast(x, tensor_scales={1: scale, 0: scale})


@pytest.mark.parametrize(("shape", "form"), [((1, 16), "codes"), ((17, 144), "blocked")], ids=str)
def test_shapes(shape, form):
    """One block, and several tiles with cut ones in both directions."""
    check_cast(draw(*shape), form=form)


def test_the_product_is_not_rounded_before_the_cast():
    x = draw(32, 128, dtype=torch.bfloat16)
    check_cast(x, form="codes", stochastic=False, **factors(FACTORS, 32, 128, torch.bfloat16))


@pytest.mark.parametrize("which", [[], FACTORS[:1], FACTORS[1:], FACTORS], ids=str)
def test_without_a_transform_an_incomplete_block_is_padded_with_positive_zeros(which):
    """Negative factors must not turn the padding into negative zeros, nor infinite factors into NaN."""
    rows = 17
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
    """Tensor cores read the padding, so NaN there would spread."""
    x = draw(33, 80) + 3
    with poisoned_memory():
        results = nvfp4_cast(x, {1: torch.tensor(1.0), 0: torch.tensor(1.0)}, "blocked")
    for dim, rows, blocks in ((1, 33, 5), (0, 80, 3)):
        scales = results[dim][1]
        assert scales.shape == (128 * -(-blocks // 4) * 4,) and scales.dtype == torch.float8_e4m3fn
        assert (bits(scales) != 0).sum() == rows * blocks


@settings(max_examples=3, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 10)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    dims=st.sampled_from(DIMS),
    stochastic=st.booleans(),
    transform=st.booleans(),
)
def test_any_matrix(shape, seed, log2_scale, dtype, form, dims, stochastic, transform):
    x = draw(shape[0], 16 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale
    check_cast(x, dims, form, transform, stochastic)


def test_random_bits_depend_on_key_step_microbatch_and_rank():
    x, scale = draw(16, 64), torch.tensor(1.0)

    def cast(key=5, step=1, microbatch=2, rank=3):
        return nvfp4_cast(x, {1: scale}, draws=torch.tensor([key, step, microbatch, rank]))[1][0]

    results = [cast(), cast(key=6), cast(key=5 + 2**40), cast(step=2), cast(microbatch=1), cast(rank=0)]
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


def test_a_transposed_matrix():
    check_cast(draw(48, 3).t(), dims=(1,), form="image", transform=False, stochastic=False)


@pytest.mark.parametrize("transform", [False, True])
def test_maxima_give_tensor_scales(transform):
    x = draw(20, 144)
    x[-1, -1] = float("inf")
    for matrix in (x[:19], x[:5] * 0, x, torch.full((5, 32), float("nan")), torch.empty(0, 32)):
        amax, transformed = nvfp4_amax(matrix, signs() if transform else None)
        assert_same_results([dynamic_tensor_scale(amax)], [dynamic_tensor_scale(matrix)])
        assert (transformed is not None) == transform


def test_compiles_once_for_all_layers_and_steps(compile_backend):
    """Keys, signs, step and the rest are tensors, so the graph holds none of their values."""

    def run(x, sign, numbers):
        amax, transformed = nvfp4_amax(x, sign)
        scales = {1: nvfp4_tensor_scale(amax), 0: nvfp4_tensor_scale(transformed)}
        casts = [nvfp4_cast(x, scales, form, signs=sign, draws=numbers) for form in ("codes", "image")]
        return [t for results in casts for result in results.values() for t in result if t is not None]

    x = draw(5, 32)
    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for step in range(2):
        sign, numbers = torch.tensor(step * 77), torch.tensor([KEY - step, step, step, step])
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            assert_same_results(compiled(x, sign, numbers), run(x, sign, numbers))


@pytest.mark.parametrize("form", FORMS)
def test_ops_match_their_schemas_and_fakes(form):
    """No input is changed or returned; shapes, dtypes and strides are as the fakes say."""
    x, scale = draw(5, 32), torch.tensor(1.0)
    tests = ("test_schema", "test_faketensor")
    if form == "codes":
        arguments = (x, draw(5), draw(32), None, scale, None, None, form)
    else:
        arguments = (x, None, None, scale, scale, signs(), draws(), form)
    torch.library.opcheck(torch.ops.mxtrain.nvfp4_cast.default, arguments, test_utils=tests)
    sign = None if form == "codes" else signs()
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
def test_refused_shapes(shape, function):
    with pytest.raises(ValueError) as error:
        function(torch.ones(shape))
    assert str(tuple(shape)) in str(error.value)


def test_refused_arguments():
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
