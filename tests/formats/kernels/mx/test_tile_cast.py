"""The cast of weights in tiles of 32 x 32, in both orientations, against the reference."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mxtrain.formats.cast_kernels import FORMS
from mxtrain.formats.matrices import joined
from mxtrain.formats.mx import reference
from mxtrain.formats.mx.cast import cast_tiles
from mxtrain.formats.mx.decode import decode_tiles
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.recipe import SCALE_ROUNDINGS
from tests.support.casts import weight_of_tiles
from tests.support.kernel_checks import (
    DTYPES,
    RECIPES,
    SMALLEST_NORMAL,
    assert_same_bits,
    assert_same_results,
    bits,
    careful_call,
    draw,
    just_above_scales,
    kernel_tests,
    poisoned_memory,
    ugly,
)

pytestmark = kernel_tests


def gain_of(columns, dtype=torch.float32):
    """Gains of both signs, one of them zero."""
    gain = draw(columns, seed=1, dtype=dtype)
    gain[1:2] = 0
    return gain


def check(parts, form="codes", gain=None, rounding="rceil", experts=1, dims=(1, 0)) -> None:
    """Require the reference's bits in both orientations."""
    with careful_call(*parts, gain):
        results = cast_tiles(parts, RECIPES[rounding], dims, form, gain, experts)
    w = joined(parts, 0, experts).float()
    w = w if gain is None else w * gain.float()
    assert results.keys() == {*dims}
    for dim, (data, scales) in results.items():
        if form == "image":
            want = reference.image(w, MXFP8, rounding, 0, torch.float32, tiles=True)
            assert scales is None and data is results[dims[0]].data
            # Triton's interpreter converts denormal bf16 numbers wrongly.
            denormal = (want != 0) & (want.abs() < SMALLEST_NORMAL)
            assert_same_bits(data, want.bfloat16(), ignore=None if data.is_cuda else denormal)
            continue
        wide = w if dim == 1 else torch.nn.functional.pad(w.t(), (0, -w.shape[0] % 32)).contiguous()
        codes, row_major = reference.cast(wide, MXFP8, rounding, tiles=True)
        assert_same_bits(scales, reference.to_blocked(row_major) if form == "blocked" else row_major)
        # The sign of a NaN code differs by processor.
        assert_same_bits(data, codes, ignore=(bits(row_major) == 255).repeat_interleave(32, 1))


def test_every_setting_on_ugly_weights():
    """43 rows and 160 columns cut a tile, and a program's part of a row."""
    for (form, rounding), dtype in zip(itertools.product(FORMS, RECIPES), itertools.cycle(DTYPES)):
        w = ugly(43, 160, dtype=dtype)
        check([w], form, rounding=rounding)
        check([w], form, gain_of(160, dtype), rounding)
    for form, dim in itertools.product(FORMS, (1, 0)):
        check([ugly(43, 160)], form, dims=(dim,))


def test_ends_of_tiles():
    for shape, form in zip([(1, 32), (31, 64), (130, 32), (33, 288)], itertools.cycle(FORMS)):
        check([draw(*shape)], form, gain_of(shape[1]))
    for shape in ((1, 1), (33, 40), (40, 80)):  # columns as well, of an image
        check([draw(*shape)], "image")
    check([draw(64, 33).t()], "image")


@pytest.mark.parametrize("rounding", SCALE_ROUNDINGS)
def test_maxima_just_above_a_scale(rounding):
    check([just_above_scales()], "codes", rounding=rounding)


def test_the_product_is_not_rounded_before_the_cast():
    for dtype in DTYPES:
        check([draw(64, 128, dtype=torch.bfloat16)], "image", gain_of(128, dtype))


@pytest.mark.parametrize("form", FORMS)
def test_joined_weights_and_experts(form):
    """A tile of 128 x 4 scales holds parts of several weights."""
    check([ugly(rows, 96, seed=rows) for rows in (96, 32, 64)], form, gain_of(96))
    check([ugly(3 * rows, 64, seed=rows) for rows in (64, 32)], form, gain_of(64), experts=3)


@settings(max_examples=6, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 80), st.integers(1, 5)),
    seed=st.integers(0, 2**31),
    log2_scale=st.integers(-60, 60),
    dtype=st.sampled_from(DTYPES),
    form=st.sampled_from(FORMS),
    rounding=st.sampled_from(SCALE_ROUNDINGS),
)
def test_any_weight(shape, seed, log2_scale, dtype, form, rounding):
    check([draw(shape[0], 32 * shape[1], seed=seed, dtype=dtype) * 2.0**log2_scale], form, rounding=rounding)


def test_padding_is_zero():
    """Of the last blocks of rows, whatever the gain, and of the blocked layout of scales."""
    with poisoned_memory():
        got = cast_tiles([draw(33, 96) + 3], RECIPES["rceil"], (1, 0), "blocked", torch.full((96,), -1.0))
    assert (bits(got[0].data)[:, 33:] == 0).all() and got[0].data.shape == (96, 64)
    for dim, rows, blocks in ((1, 33, 3), (0, 96, 2)):
        scales = bits(got[dim].scales)
        assert scales.shape == (512,) and (scales != 0).sum() == rows * blocks and (scales != 255).all()


def test_codes_are_those_of_other_references():
    """As in ``tests/formats/mx/test_mx_tiles.py``."""
    for dim, (data, _) in cast_tiles([weight_of_tiles(64, 96)], RECIPES["rceil"]).items():
        codes = bits(data if dim == 1 else data.t())
        assert codes[0, :6].tolist() == [0xF8, 0xE4, 0x72, 0xF1, 0x66, 0xF7]
        assert codes[40, 70:76].tolist() == [0xF3, 0x6B, 0xF2, 0x6D, 0xF1, 0x6F]


def test_compiles_without_a_graph_break(compile_backend):
    def run(w, gain):
        casts = [cast for form in FORMS for cast in cast_tiles([w], RECIPES["rceil"], (1, 0), form, gain).values()]
        return [t for cast in casts for t in cast if t is not None]

    compiled = torch.compile(run, backend=compile_backend, fullgraph=True)
    w, gain = draw(33, 96), gain_of(96)
    assert_same_results(compiled(w, gain), run(w, gain))


@pytest.mark.parametrize("form", FORMS)
def test_op_matches_its_schema_and_fake(form):
    """No input is changed or returned; shapes, dtypes and strides are as the fake says."""
    along = (True, False) if form == "image" else (form == "codes", True)
    arguments = ([draw(32, 64)] * 2, None if form == "codes" else gain_of(64), 1, *along, "e4m3", "rceil", form)
    op = torch.ops.mxtrain.cast_tiles.default
    torch.library.opcheck(op, arguments, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_decoded_as_the_reference_decodes_them(dtype):
    w = ugly(64, 160, seed=3)
    codes, scales = reference.cast(w, MXFP8, "rceil", tiles=True)
    rows, values = scales.view(torch.uint8)[::32].contiguous(), torch.empty(w.shape, dtype=dtype, device=w.device)
    with careful_call(codes, rows):
        decode_tiles(codes, rows, values)
    assert_same_bits(values, reference.dequantize(codes, scales, MXFP8, dtype))
