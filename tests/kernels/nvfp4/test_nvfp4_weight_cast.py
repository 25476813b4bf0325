"""The NVFP4 cast of weights in tiles, in both orientations, against the reference's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_checks import DTYPES, assert_same_results, bits, draw, kernel_tests, poisoned_memory, ugly
from nvfp4_checks import check_weight

from mxtrain.kernels.cast_results import FORMS
from mxtrain.kernels.nvfp4.weight_cast import nvfp4_weight
from mxtrain.reference import nvfp4

pytestmark = kernel_tests


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(1, 16), (16, 16), (15, 32), (48, 272), (64, 112), (17, 400), (130, 32)], ids=str)
def test_every_shape(shape, form, dtype):
    check_weight(draw(*shape, dtype=dtype), form)


@pytest.mark.parametrize("gain_dtype", DTYPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_gain(form, dtype, gain_dtype):
    """The product is not rounded before the cast; some gains are zero or negative."""
    gain = draw(96, seed=1, dtype=gain_dtype)
    gain[3] = 0
    check_weight(draw(48, 96, dtype=dtype), form, gain)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_ugly_weights(form, dtype):
    """Tiles of every size, with infinities and NaN, by several tensor scales and the dynamic one, NaN here."""
    w = ugly(48, 96, dtype=dtype)
    w[16:32, 16:32] = 0
    w[20, 40] = 1e4
    for exponent in (-20, 0, 30):
        check_weight(w, form, tensor_scale=torch.tensor(2.0**exponent))
    check_weight(w, form)


@settings(max_examples=12, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 20)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
)
def test_any_weight(shape, seed, log2_scale, dtype, form):
    check_weight(draw(shape[0], 16 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale, form)


@pytest.mark.parametrize("layout", [lambda t: t.t().contiguous().t(), lambda t: t.repeat(1, 2)[:, : t.shape[1]]])
def test_layouts(layout):
    check_weight(layout(draw(19, 48)))


def test_both_orientations_have_the_same_values():
    w = draw(48, 96)
    got = nvfp4_weight(w, nvfp4.power_of_two_tensor_scale(w))
    assert torch.equal(nvfp4.dequantize(*got[:2]), nvfp4.dequantize(*got[2:]).t())


def test_padding_of_the_blocked_layout_is_zero():
    with poisoned_memory():
        got = nvfp4_weight(draw(33, 80) + 3, torch.tensor(1.0), "blocked")
    for scales, rows, blocks in ((got.scales, 33, 5), (got.transposed_scales, 80, 3)):
        assert scales.shape == (128 * -(-blocks // 4) * 4,) and (bits(scales) != 0).sum() == rows * blocks


@pytest.mark.parametrize("form", FORMS)
def test_compiles_without_a_graph_break(form, compile_backend):
    def run(w, gain):
        scale = nvfp4.power_of_two_tensor_scale(w * gain)
        return [t for t in nvfp4_weight(w, scale, form, gain) if t is not None]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    w, gain = draw(48, 96), draw(96, seed=1)
    assert_same_results(compiled(w, gain), run(w, gain))


@pytest.mark.parametrize("form", FORMS)
def test_custom_op_keeps_its_word(form):
    """Schema (no input is changed or returned) and fake (shapes, dtypes, strides)."""
    for gain in (None, draw(96, seed=1)):
        arguments = (draw(35, 96), gain, torch.tensor(1.0), form)
        torch.library.opcheck(
            torch.ops.mxtrain.nvfp4_weight.default, arguments, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.parametrize("shape", [(0, 96), (5, 0)], ids=str)
def test_nothing_to_cast(shape):
    for form in FORMS:
        data, scales, transposed, _ = nvfp4_weight(torch.empty(shape), torch.tensor(1.0), form)
        assert data.numel() == 0 and (scales is None or transposed.numel() == 0)


def test_what_it_does_not_take():
    one = torch.tensor(1.0)
    for shape in ((), (96,), (2, 3, 96), (2, 24)):
        with pytest.raises(ValueError) as error:
            nvfp4_weight(torch.ones(shape), one)
        assert str(shape) in str(error.value)
    w = torch.ones(2, 32)
    with pytest.raises(ValueError, match="dtype torch.float16 of w"):
        nvfp4_weight(w.half(), one)
    with pytest.raises(ValueError, match="form = 'swizzled'"):
        nvfp4_weight(w, one, "swizzled")
    with pytest.raises(ValueError, match=r"gain \(2,\)"):
        nvfp4_weight(w, one, gain=torch.ones(2))
    with pytest.raises(ValueError, match=r"tensor_scale \(2,\)"):
        nvfp4_weight(w, torch.ones(2))
