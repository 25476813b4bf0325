"""Casts of SwiGLU and of its gradients, against the formula and the reference's cast of its result."""

import itertools

import pytest
import torch
import triton
import triton.language as tl

from mxtrain.formats import swiglu as reference
from mxtrain.formats.cast_kernels import FORMS, by_dim, casts_of
from mxtrain.formats.mx.swiglu_cast import sigmoid, swiglu, swiglu_backward_cast, swiglu_cast, swiglu_dgate
from mxtrain.formats.mxfp8 import MXFP8, MXFP8_E5M2
from tests.support.kernel_checks import (
    DTYPES,
    LAYOUTS,
    RECIPES,
    assert_is_cast,
    assert_same_results,
    careful_call,
    draw,
    just_above_scales,
    kernel_tests,
    ugly,
)

pytestmark = kernel_tests
TILE = 2048


@triton.jit
def _formula_kernel(dh_ptr, gate_ptr, up_ptr, h_ptr, dup_ptr, dgate_ptr, count, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    gate, up, dh = (
        tl.load(gate_ptr + at, mask=at < count).to(tl.float32),
        tl.load(up_ptr + at, mask=at < count).to(tl.float32),
        tl.load(dh_ptr + at, mask=at < count).to(tl.float32),
    )
    s = sigmoid(gate)
    silu = gate * s
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    tl.store(h_ptr + at, swiglu(silu, up, dtype), mask=at < count)
    tl.store(dup_ptr + at, swiglu(silu, dh, dtype), mask=at < count)
    tl.store(dgate_ptr + at, swiglu_dgate(silu, s, up, dh, dtype), mask=at < count)


def formula(dh, gate, up):
    """h, dup and dgate as the kernels compute them before they cast, in fp32."""
    dh, gate, up = (t.contiguous() for t in (dh, gate, up))
    results = [torch.full(gate.shape, float("nan")) for _ in range(3)]
    _formula_kernel[(triton.cdiv(gate.numel(), TILE),)](dh, gate, up, *results, gate.numel(), TILE)
    return results


def inputs(rows, columns, dtype=torch.bfloat16):
    """dh, gate and up. Half of the rows of gate have ordinary values, where silu is not linear."""
    dh, gate, up = (ugly(rows, columns, seed, dtype) for seed in range(3))
    gate[1::2] = draw(*gate[1::2].shape, seed=3, dtype=dtype) * 4
    return dh, gate, up


def forward(gate, up, rounding="rceil", form="codes", dims=(1, 0)):
    """{dim: cast of h}"""
    return by_dim(swiglu_cast(gate, up, 1 in dims, 0 in dims, "e4m3", rounding, form), dims, form)


def backward(dh, gate, up, rounding="rceil", form="codes", dims=(1, 0), h_columns=True, joined=False, element="e4m3"):
    """Casts by dimension of dgate, or of [dgate, dup], and of dup; the cast of h along its columns."""
    settings = 1 in dims, 0 in dims, h_columns, joined, "e4m3", element, rounding, form
    results = swiglu_backward_cast(dh, gate, up, *settings)
    casts, dims = casts_of(results, form), sorted(dims, reverse=True)
    assert len(casts) == (1 if joined else 2) * len(dims) + h_columns
    dup = {} if joined else dict(zip(dims, casts[len(dims) :]))
    return dict(zip(dims, casts)), dup, casts[-1] if h_columns else None


def check_forward(gate, up, rounding="rceil", form="codes", dims=(1, 0)):
    with careful_call(gate, up):
        got = forward(gate, up, rounding, form, dims)
    h, _, _ = formula(up, gate, up)
    assert got.keys() == {*dims}
    for dim in dims:
        assert_is_cast(got[dim], h, rounding, form, dim)


def check_backward(dh, gate, up, rounding="rceil", form="codes", dims=(1, 0), h_columns=True, joined=False, fmt=MXFP8):
    with careful_call(dh, gate, up):
        element = "e4m3" if fmt is MXFP8 else "e5m2"
        of_dgate, of_dup, of_h = backward(dh, gate, up, rounding, form, dims, h_columns, joined, element)
    h, dup, dgate = formula(dh, gate, up)
    dgate = torch.cat([dgate, dup], 1) if joined else dgate
    for dim in dims:
        assert_is_cast(of_dgate[dim], dgate, rounding, form, dim, fmt)
        if not joined:
            assert_is_cast(of_dup[dim], dup, rounding, form, dim, fmt)
    if h_columns:
        assert_is_cast(of_h, h, rounding, form, 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_formula_is_rounded_once(dtype):
    dh, gate, up = inputs(64, 160, dtype)
    (h, dup, dgate), wide = formula(dh, gate, up), [t.float() for t in (dh, gate, up)]
    want_dgate, want_dup = reference.swiglu_backward(*wide)
    s = torch.sigmoid(wide[1])
    canceling = (wide[0] * wide[2] * s).abs() * (1 + wide[1].abs() * (1 - s))
    pairs = (h, reference.swiglu(*wide[1:]), None), (dup, want_dup, None), (dgate, want_dgate, canceling)
    for got, want, scale in pairs:
        scale = (want if scale is None else scale).abs().nan_to_num(0, 0, 0)
        step = 2.0**-8 if dtype == torch.bfloat16 else 0.0
        # The argument of exp is rounded, which changes its result by up to 2^-24 |gate|; twice that is allowed.
        error = (2.0**-20 + 2.0**-23 * wide[1].abs().nan_to_num(0, 0, 0).clamp(max=128)) * scale
        error += step * want.abs().nan_to_num(0, 0, 0) * 1.001 + 1e-37
        assert torch.equal(got.isnan(), want.isnan())
        finite = want.abs() < 3e38
        assert torch.equal(got[want.isinf()], want[want.isinf()])
        assert ((got - want).abs() <= error)[finite].all()
        assert finite.float().mean() > 0.7 and (want[finite] != 0).float().mean() > 0.3
        assert torch.equal(got.to(dtype).float().nan_to_num(0), got.nan_to_num(0))


def test_every_form_on_ugly_rows():
    """Tiles are cut in both directions, and the last block of tokens is incomplete."""
    dh, gate, up = inputs(43, 96)
    for form in FORMS:
        check_forward(gate, up, form=form)
        check_backward(dh, gate, up, form=form, joined=form != "codes")


@pytest.mark.parametrize("form", ["image", pytest.param("codes", marks=pytest.mark.sweep)])
def test_gradients_of_other_elements_than_those_of_h(form):
    check_backward(*inputs(43, 96), form=form, fmt=MXFP8_E5M2)


@pytest.mark.sweep
def test_every_setting_on_ugly_rows():
    for form, rounding, joined in itertools.product(FORMS, RECIPES, (False, True)):
        dh, gate, up = inputs(33, 96)
        check_forward(gate, up, rounding, form)
        check_backward(dh, gate, up, rounding, form, joined=joined)


@pytest.mark.sweep
def test_single_casts_of_fp32():
    dh, gate, up = inputs(43, 160, torch.float32)
    for form, dims in itertools.product(FORMS, [(1,), (0,)]):
        check_forward(gate, up, form=form, dims=dims)
        check_backward(dh, gate, up, form=form, dims=dims, h_columns=False, joined=form == "blocked")


def test_results_in_fp32_have_the_scales_of_fp32_numbers():
    """With a gate of 128, whose sigmoid is 1: h is 128 up, dup is 128 dh, and dgate is dh up."""
    part = just_above_scales() / 128
    gate = torch.full_like(part, 128.0)
    check_forward(gate, part)
    check_backward(part, gate, gate)


def test_gate_and_up_may_be_halves_of_one_matrix():
    dh, gate, up = inputs(20, 96)
    both = torch.cat([gate, up], 1)
    left, right = both.chunk(2, 1)
    assert left.stride() == (192, 1)
    check_forward(left, right, form="image")
    check_backward(dh, left, right, form="image")


@pytest.mark.sweep
@pytest.mark.parametrize("layout", LAYOUTS)
def test_any_strides(layout):
    dh, gate, up = (layout(t) for t in inputs(33, 64))
    check_forward(gate, up)
    check_backward(dh, gate, up)


def test_no_tokens():
    empty = torch.empty(0, 64, dtype=torch.bfloat16)
    assert forward(empty, empty, form="image")[0].data.shape == (0, 64)
    dgate, _, h = backward(empty, empty, empty, form="image", joined=True)
    assert dgate[1].data.shape == (0, 128) and h.data.shape == (0, 64)


def test_the_same_bits_from_every_combination():
    """One cast, both casts, joined or not."""
    dh, gate, up = inputs(33, 64)
    (dgate, dup, h), rows = (backward(dh, gate, up, dims=dims) for dims in ((1, 0), (1,)))
    for one, other in ((dgate[1], rows[0][1]), (dup[1], rows[1][1]), (h, rows[2])):
        assert_same_results(one, other)
    assert_same_results(h, forward(gate, up, dims=(0,))[0])
