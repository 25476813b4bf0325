"""The NVFP4 cast of weights in tiles, in both orientations, against the reference."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
from tests.support.kernel_checks import DTYPES, assert_same_results, bits, draw, kernel_tests, poisoned_memory, ugly
from tests.support.nvfp4_checks import check_weight

pytestmark = kernel_tests


def gain_of(columns, dtype):
    """Gains of both signs, one of them zero."""
    gain = draw(columns, seed=1, dtype=dtype)
    gain[3] = 0
    return gain


def test_shapes():
    """One tile, and several with cut ones in both directions."""
    for shape, form in (((1, 16), "codes"), ((17, 144), "blocked")):
        check_weight(draw(*shape, dtype=torch.bfloat16), form)


@pytest.mark.parametrize(
    ("form", "dtype"), [("codes", DTYPES[1]), ("blocked", DTYPES[0]), ("image", DTYPES[1])], ids=str
)
def test_ugly_weights(form, dtype):
    """Tiles of every size, with infinities and NaN, by fixed tensor scales and by the dynamic one, which is NaN."""
    w = ugly(19, 48, dtype=dtype)
    w[16:, 16:32] = 0
    w[17, 40] = 1e4
    check_weight(w, form, tensor_scale=torch.tensor(2.0**-20))
    check_weight(w, form, gain_of(48, dtype), tensor_scale=torch.tensor(2.0**30))
    check_weight(w, form)


@pytest.mark.parametrize("form", ["codes", "image"])
def test_the_product_is_not_rounded_before_the_cast(form):
    for gain_dtype in DTYPES:
        check_weight(draw(16, 128, dtype=torch.bfloat16), form, gain_of(128, gain_dtype))


@settings(max_examples=3, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 20), st.integers(1, 10)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
)
def test_any_weight(shape, seed, log2_scale, dtype, form):
    check_weight(draw(shape[0], 16 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale, form)


def test_a_transposed_weight():
    check_weight(draw(48, 3).t(), "image")


def test_both_orientations_have_the_same_values():
    w = draw(32, 96)
    got = nvfp4_weight([w], [nvfp4.power_of_two_tensor_scale(w)])
    assert torch.equal(nvfp4.dequantize(*got[1]), nvfp4.dequantize(*got[0]).t())


def test_padding_of_the_blocked_layout_is_zero():
    with poisoned_memory():
        got = nvfp4_weight([draw(33, 80) + 3], [torch.tensor(1.0)], "blocked")
    for scales, rows, blocks in ((got[1].scales, 33, 5), (got[0].scales, 80, 3)):
        assert scales.shape == (128 * -(-blocks // 4) * 4,) and (bits(scales) != 0).sum() == rows * blocks


def test_compiles_without_a_graph_break(compile_backend):
    """One graph with every form."""

    def run(w, gain):
        scale = nvfp4.power_of_two_tensor_scale(w * gain)
        casts = [cast for form in FORMS for cast in nvfp4_weight([w], [scale], form, gain).values()]
        return [t for cast in casts for t in cast if t is not None]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    w, gain = draw(16, 96), draw(96, seed=1)
    assert_same_results(compiled(w, gain), run(w, gain))


@pytest.mark.parametrize("form", FORMS)
def test_op_matches_its_schema_and_fake(form):
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    arguments = ([draw(5, 32)], [torch.tensor(1.0)], None if form == "codes" else draw(32, seed=1), None, form)
    torch.library.opcheck(
        torch.ops.mxtrain.nvfp4_weight.default, arguments, test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("shape", [(0, 96), (5, 0)], ids=str)
def test_nothing_to_cast(shape):
    for form in FORMS:
        results = nvfp4_weight([torch.empty(shape)], [torch.tensor(1.0)], form)
        assert results[1].data.numel() == results[0].data.numel() == 0
