"""The casts along rows, columns or both, in both formats, with factors, against the reference's cast of the product.

NVFP4's casts also have a transform, random bits, and the maxima for tensor scales.
"""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.nvfp4.cast import nvfp4_cast
from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
from mxtrain.launch.launch import INTERPRETED
from tests.support.kernel_checks import (
    DTYPES,
    OTHER_ELEMENTS,
    RECIPES,
    SMALLEST_NORMAL,
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
from tests.support.nvfp4_checks import KEY, draws, signs
from tests.support.nvfp4_checks import check_cast as check_nvfp4_cast

pytestmark = kernel_tests

DIMS = [(1,), (0,), (1, 0)]
FACTORS = ["row_factor", "column_factor"]
CHOICES = [[], FACTORS[:1], FACTORS[1:], FACTORS]


def factors(which, rows, columns, dtype=torch.float32):
    """A positive row factor, as rho is, and a column factor of both signs with a zero, as a gain can be."""
    chosen = {}
    if "row_factor" in which:
        chosen["row_factor"] = (draw(rows, seed=1).abs() + 0.1).to(dtype)
    if "column_factor" in which:
        chosen["column_factor"] = draw(columns, seed=2, dtype=dtype)
        chosen["column_factor"][1:2] = 0
    return chosen


class Format(NamedTuple):
    """What differs: the block size, a call with tensor scales of one, and a check of the cast to nearest."""

    block: int
    call: Callable
    check: Callable
    scales: torch.dtype

    def __str__(self):
        return "mxfp8" if self.block == 32 else "nvfp4"


def _nvfp4(x, dims, form="codes", **chosen):
    return nvfp4_cast([x], torch.ones(1, 1), form, dims, **chosen)


MXFP8 = Format(
    32,
    lambda x, dims, form="codes", rounding="rceil", **chosen: cast(x, RECIPES[rounding], dims, form, **chosen),
    lambda x, dims, form="codes", **chosen: check_cast(x, form=form, dims=dims, **chosen),
    torch.float8_e8m0fnu,
)
NVFP4 = Format(
    16,
    _nvfp4,
    lambda x, dims, form="codes", **chosen: check_nvfp4_cast(
        x, dims, form, transform=False, stochastic=False, **chosen
    ),
    torch.float8_e4m3fn,
)
formats = pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])


def test_every_mxfp8_setting_on_ugly_rows():
    for form, rounding, dtype in itertools.product(FORMS, RECIPES, DTYPES):
        check_cast(ugly(43, 160, dtype=dtype), rounding, form, (1, 0))
    for form, dims in itertools.product(FORMS, [(1,), (0,)]):
        check_cast(ugly(43, 160), form=form, dims=dims)


SETTINGS_OF_ELEMENTS = [
    # Forms and roundings that share no code, and Hadamard transforms of rows that are no whole blocks.
    *((element, *of) for element in OTHER_ELEMENTS for of in (("codes", "rceil", False), ("image", "floor", False))),
    ("e2m1", "codes", "floor", True),
    ("e2m1", "image", "rceil", True),
    # Every pair of two settings.
    *(
        pytest.param(element, form, rounding, transform, marks=pytest.mark.sweep)
        for (i, form), (j, rounding) in itertools.product(enumerate(FORMS), enumerate(RECIPES))
        for element, transform in [(("e2m1", True), ("e2m1", False), ("e5m2", False))[(i + j) % 3]]
    ),
]


@pytest.mark.parametrize(("element", "form", "rounding", "transform"), SETTINGS_OF_ELEMENTS)
def test_other_elements_on_ugly_rows(element, form, rounding, transform):
    recipe = OTHER_ELEMENTS[element]
    check_cast(ugly(43, 160), rounding, form, (1, 0), recipe=recipe, transform=transform)
    chosen = factors(FACTORS[:1], 43, 96)
    check_cast(ugly(43, 96, dtype=torch.bfloat16), rounding, form, (0,), recipe=recipe, transform=transform, **chosen)


# Every value of each setting, and every pair of values that share code.
NVFP4_SETTINGS = [
    dict(dims=(1, 0), stochastic=False, transform=False, form="codes", which=[]),
    dict(dims=(1, 0), stochastic=True, transform=True, form="codes", which=FACTORS[1:]),
    dict(dims=(1, 0), stochastic=True, transform=True, form="image", which=FACTORS[:1]),
    dict(dims=(1, 0), stochastic=True, transform=False, form="blocked", which=FACTORS),
    dict(dims=(0,), stochastic=False, transform=True, form="blocked", which=FACTORS[:1]),
    dict(dims=(1,), stochastic=True, transform=False, form="image", which=[]),
]


@pytest.mark.parametrize(("setting", "dtype"), list(zip(NVFP4_SETTINGS, itertools.cycle(DTYPES))))
def test_every_nvfp4_setting_on_ugly_rows(setting, dtype):
    """19 rows and 48 columns cut a tile in both directions.

    Finite rows take the dynamic tensor scale. Rows with infinities and NaN take fixed scales, too small for the
    infinite rows and too large for most others.
    """
    setting = dict(setting)
    x, chosen = ugly(19, 48, dtype=dtype), factors(setting.pop("which"), 19, 48, dtype)
    check_nvfp4_cast(x.nan_to_num(0.0, 3e38, -3e38), **setting, **chosen)
    scales = {1: torch.tensor(2.0**-20), 0: torch.tensor(2.0**30)}
    check_nvfp4_cast(x, tensor_scales=scales, **setting, **chosen)


@pytest.mark.parametrize("form", FORMS)
def test_mxfp8_with_factors_of_ugly_rows(form):
    for which, dtype in zip(CHOICES[1:], itertools.cycle(DTYPES)):
        chosen = factors(which, 43, 96, dtype)
        if "row_factor" in chosen:
            chosen["row_factor"][10:14] = torch.tensor([0.0, float("inf"), float("nan"), 2.0**-100])
        check_cast(ugly(43, 96), form=form, dims=(1, 0), **chosen)
    check_cast(ugly(43, 96), form=form, dims=(0,), **factors(FACTORS[:1], 43, 96))


@pytest.mark.parametrize("form", ["codes", "image"])
def test_rows_in_another_order(form):
    """Rows that come twice, never, and rows of zeros between them, with what they would hold in memory not a number."""
    x, source = ugly(43, 160), torch.tensor([5, -1, 42, 5, 0, *[-1] * 31, *range(10, 17), -1])
    moved = torch.where((source < 0)[:, None], 0, x[source.clamp(min=0)])
    for dims, column_factor in (((1,), None), ((0,), None), ((1, 0), draw(160, seed=2))):
        with poisoned_memory():
            found = cast(x, RECIPES["rceil"], dims, form, column_factor=column_factor, source=source)
        want = cast(moved, RECIPES["rceil"], dims, form, column_factor=column_factor)
        for dim in dims:
            assert_same_results(found[dim], want[dim])


@pytest.mark.parametrize(("fmt", "which"), [*((MXFP8, which) for which in CHOICES[1:]), (NVFP4, FACTORS)], ids=str)
def test_the_product_is_not_rounded_before_the_cast(fmt, which):
    """Hundreds of elements lie next to a rounding boundary, so a product in bf16 would show."""
    shape = (96, 320) if fmt is MXFP8 else (32, 128)
    fmt.check(draw(*shape, dtype=torch.bfloat16), (1, 0), **factors(which, *shape, torch.bfloat16))


def test_products_of_bf16_numbers_have_the_scales_of_fp32_numbers():
    numbers = just_above_scales()[:, ::4].contiguous()
    ones = torch.ones_like(numbers, dtype=torch.bfloat16)
    check_cast(ones, dims=(1, 0), column_factor=numbers[0])
    check_cast(ones.t().contiguous(), dims=(1, 0), row_factor=numbers[0])


def test_an_fp32_matrix_can_be_rounded_to_bf16_first():
    for form, x, which in (("codes", ugly(43, 96), []), ("image", draw(33, 96), FACTORS)):
        of_factors = factors(which, *x.shape).values() or (None, None)
        others = (1, False, True, True, "e4m3", "rceil", form)
        run = lambda x, to_bf16: torch.ops.mxtrain.cast([x], 0, *of_factors, None, to_bf16, *others)  # noqa: B023, E731
        if INTERPRETED:
            x[x.abs() < SMALLEST_NORMAL] = 0
        rounded = x.bfloat16()
        assert_same_results(run(x, True), run(rounded, False))
        assert_same_results(run(rounded, True), run(rounded, False))
    assert not torch.equal(bits(run(x, True)[0]), bits(run(x, False)[0]))


def test_a_nan_makes_the_dynamic_tensor_scale_nan():
    check_nvfp4_cast(ugly(16, 48))


def test_denormals_are_rounded_as_in_the_reference():
    """Products with signs / 16 are not fused into the first sums of the transform."""
    x = draw(32, 64) * 2.0 ** torch.arange(-149, -117)[:, None]
    scale = torch.tensor(2.0**-121)
    check_nvfp4_cast(x, tensor_scales={1: scale, 0: scale})


def test_every_shape():
    """One block, and several tiles with cut ones in both directions."""
    for shape, form in zip([(1, 32), (31, 64), (130, 32), (33, 288)], itertools.cycle(FORMS)):
        check_cast(draw(*shape), form=form, dims=(1, 0))
    for shape, form in zip([(1, 1), (33, 40), (5, 33), (33, 130)], itertools.cycle(FORMS)):
        check_cast(draw(*shape), form=form, dims=(0,), **factors(FACTORS, *shape))
    for shape, form in (((1, 16), "codes"), ((17, 144), "blocked")):
        check_nvfp4_cast(draw(*shape), form=form)
    NVFP4.check(draw(48, 3).t(), (1,), "image")


@formats
@pytest.mark.parametrize("which", CHOICES, ids=str)
def test_an_incomplete_block_is_padded_with_positive_zeros(fmt, which):
    """Negative factors must not turn the padding into negative zeros, nor infinite factors into NaN."""
    for rows in (1, fmt.block + 1):
        x, chosen = draw(rows, 64) + 3, factors(which, rows, 64)
        for factor in chosen.values():
            factor.neg_()
        if "column_factor" in chosen:
            chosen["column_factor"][::5] = -float("inf")
        if fmt is MXFP8:
            chosen["rounding"] = "rceil_0_18"
        with poisoned_memory():
            data, _ = fmt.call(x, (0,), "codes" if fmt is MXFP8 else "image", **chosen)[0]
        data = data if fmt is MXFP8 else data.t()
        assert data.shape == (64, -(-rows // fmt.block) * fmt.block)
        # A NaN block has NaN codes throughout. Infinite blocks have numbers as codes, for MXFP8 under this rule.
        assert (bits(data)[:, rows:] == 0).all()


@formats
@pytest.mark.parametrize("dims", [(1,), (0,)], ids=str)
def test_padding_of_the_blocked_layout_is_zero(fmt, dims):
    """Tensor cores read the padding, so NaN there would spread."""
    with poisoned_memory():
        _, scales = fmt.call(draw(33, 96) + 3, dims, "blocked")[dims[0]]
    rows, length = (33, 96) if dims == (1,) else (96, 33)
    blocks = -(-length // fmt.block)
    assert scales.shape == (128 * -(-blocks // 4) * 4,) and scales.dtype == fmt.scales
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
    which=st.sampled_from(CHOICES),
)
def test_any_matrix_to_mxfp8(shape, seed, log2_scale, dtype, form, rounding, dims, which):
    rows, columns = shape[0], 32 * shape[1]
    x = draw(rows, columns, seed=seed, dtype=dtype) * 2.0**log2_scale
    check_cast(x, rounding, form, dims, **factors(which, rows, columns))


def test_random_bits_depend_on_key_step_microbatch_and_rank():
    x, scales = draw(16, 16), torch.ones(1, 1)

    def cast(key=5, step=1, microbatch=2, rank=3):
        return nvfp4_cast([x], scales, dims=(1,), draws=[torch.tensor([key, step, microbatch, rank])])[1][0]

    results = [cast(), cast(key=6), cast(key=5 + 2**40), cast(step=2), cast(microbatch=1), cast(rank=0)]
    assert all(not torch.equal(a, b) for i, a in enumerate(results) for b in results[:i])


@gpu_only
@formats
@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time(fmt, form):
    x = draw(4097, 4096)
    run = lambda: [t for result in fmt.call(x, (1, 0), form).values() for t in result]  # noqa: E731
    first = run()
    for _ in range(3):
        assert_same_results(run(), first)


def test_mxfp8_compiles_without_a_graph_break(compile_backend):
    """One graph with every form, orientation and factor."""
    calls = list(zip(FORMS, [(1,), (0,), (1, 0)], CHOICES))

    def run(x, *chosen):
        casts = [cast(x + x, RECIPES["rceil"], dims, form, **kwargs) for (form, dims, _), kwargs in zip(calls, chosen)]
        return [t for results in casts for result in results.values() for t in result if t is not None]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for rows in (33, 50):  # the row count is symbolic from the second call on
        arguments = draw(rows, 64), *(factors(which, rows, 64) for _, _, which in calls)
        assert_same_results(compiled(*arguments), run(*arguments))


def test_nvfp4_compiles_once_for_all_layers_and_steps(compile_backend):
    """Keys, signs, step and the rest are tensors, so the graph holds none of their values."""

    def run(x, sign, numbers):
        scales = nvfp4_tensor_scales([x], sign)
        casts = [nvfp4_cast([x], scales, form, signs=sign, draws=[numbers]) for form in ("codes", "image")]
        return [t for results in casts for result in results.values() for t in result if t is not None]

    x = draw(5, 32)
    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    for step in range(2):
        sign, numbers = torch.tensor(step * 77), torch.tensor([KEY - step, step, step, step])
        with torch.compiler.set_stance("fail_on_recompile" if step else "default"):
            assert_same_results(compiled(x, sign, numbers), run(x, sign, numbers))


@pytest.mark.parametrize("form", ["codes", "blocked"])
def test_ops_match_their_schemas_and_fakes(form):
    """No input is changed or returned; shapes, dtypes and strides are as the fakes say."""
    x, one, plain, ours = draw(17, 32), torch.ones(1, 1), form == "codes", torch.ops.mxtrain
    row_factor, column_factor = (draw(17), draw(32)) if plain else (None, None)
    sign, scales = (None, (one, [0])) if plain else (signs(), (one, [1, 0]))
    for op, arguments in {
        ours.cast: ([x], 0, row_factor, column_factor, None, False, 1, not plain, plain, True, "e4m3", "rceil", form),
        ours.nvfp4_cast: ([x], 0, row_factor, column_factor, *scales, sign, [] if plain else [draws()], None, form),
        ours.nvfp4_tensor_scales: ([x, x], None, None, sign, None),
    }.items():
        torch.library.opcheck(op.default, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(0, 96), (5, 0)], ids=str)
def test_nothing_to_cast_to_nvfp4(shape, form):
    results = nvfp4_cast([torch.empty(shape)], torch.ones(1, 1), form, signs=signs())
    rows, columns = shape
    if form == "image":
        assert [results[dim][0].shape for dim in (1, 0)] == [(rows, columns), (-(-rows // 16) * 16, columns)]
    else:
        assert [results[dim][0].shape for dim in (1, 0)] == [(rows, columns // 2), (columns, -(-rows // 16) * 8)]
        assert all(results[dim][1].numel() == 0 for dim in (1, 0))
