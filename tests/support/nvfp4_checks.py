"""Shared by the NVFP4 kernel tests: checks that call a kernel and require the bits of the reference."""

import torch

from mxtrain.formats import mxnorm
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hadamard import hadamard, pad
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.nvfp4 import static_tensor_scale
from mxtrain.formats.nvfp4.cast import nvfp4_cast
from mxtrain.formats.nvfp4.norm import nvfp4_norm
from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight
from mxtrain.launch.launch import INTERPRETED
from mxtrain.rng.philox import rounding_bits, rounding_words
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask
from tests.support.kernel_checks import (
    SMALLEST_NORMAL,
    assert_close,
    assert_same_bits,
    assert_within_ulps,
    careful_call,
)

SIGNS = hadamard_signs(0, "layers.0.attention.wq")
KEY = rounding_key(0, "layers.0.attention.wq")
STEP, MICROBATCH, RANK = 2**32 - 2, 2, 3


def estimate_16(p: int = 2, estimator: str = "pre_round", eps: float = 1e-5) -> RMSEstimate:
    return RMSEstimate(p, estimator, eps, 16)


def signs() -> torch.Tensor:
    return torch.tensor(sign_mask(SIGNS))


def draws() -> torch.Tensor:
    """A view into a tensor, at an address that is no multiple of 16."""
    return torch.tensor([0, KEY, STEP, MICROBATCH, RANK])[1:]


def positive_nans(scales: torch.Tensor) -> torch.Tensor:
    """E4M3 with every NaN positive, as kernels write it. A CPU makes infinity / infinity a negative NaN."""
    return torch.where(scales.float().isnan(), 0x7F, scales.view(torch.uint8)).view(scales.dtype)


def assert_is_nvfp4(got, want, tensor_scale, form: str) -> None:
    """Require ``got`` = (data, scales) in this form to be the reference's ``want`` = (codes, scales), to the bit."""
    data, scales = got
    codes, row_major = want[0], positive_nans(want[1])
    if form == "image":
        assert scales is None
        values = nvfp4.dequantize(codes, row_major, tensor_scale)
        denormal = (values != 0) & (values.abs() < SMALLEST_NORMAL)
        assert_same_bits(data.contiguous(), values.bfloat16(), ignore=denormal if INTERPRETED else None)
        return
    assert_same_bits(scales, casts.to_blocked(row_major) if form == "blocked" else row_major)
    # The NaN scale of a block that holds a NaN makes its codes irrelevant.
    assert_same_bits(data, codes, ignore=row_major.float().isnan().repeat_interleave(8, 1))


def check_norm(x, tensor_scale=None, form="codes", residual=None, **estimate) -> None:
    """Require rho within 2 ulp of the reference, and the exact cast for that rho."""
    estimate = estimate_16(**estimate)
    if tensor_scale is None:
        tensor_scale = static_tensor_scale(x.shape[1], estimate.p, estimate.estimator)
    with careful_call(x, residual):
        data, scales, rho, total, _ = nvfp4_norm(x, estimate, tensor_scale, form, residual)
    if residual is None:
        assert total is None
    else:
        exact = x.float() + residual.float()
        assert total.dtype == x.dtype
        assert_close(total, exact.double(), torch.zeros_like(exact))
        x = total
    assert_within_ulps(rho, mxnorm.inverse_rms(x, estimate, None), 2)
    want = nvfp4.cast(mxnorm.scale_rows(x, rho), tensor_scale)
    assert_is_nvfp4((data, scales), want, tensor_scale, form)


def product(x, row_factor=None, column_factor=None) -> torch.Tensor:
    x = x.float()
    if row_factor is not None:
        x = x * row_factor.float()[:, None]
    return x if column_factor is None else x * column_factor.float()


def check_cast(x, dims=(1, 0), form="codes", transform=True, stochastic=True, tensor_scales=None, **factors) -> None:
    """Require the reference's bits. Tensor scales, unless given, come from ``nvfp4_tensor_scales``."""
    rows, columns = x.shape
    sign_tensor = signs() if transform else None
    along = {1: product(x, **factors), 0: pad(product(x, **factors))}
    if transform:
        along[0] = hadamard(along[0], SIGNS, 0)
    if tensor_scales is None:
        with careful_call(x, *factors.values()):
            scales = nvfp4_tensor_scales([x], sign_tensor, **factors)
        tensor_scales = {dim: nvfp4.power_of_two_tensor_scale(along[dim]) for dim in along}
        assert_same_bits(scales, torch.stack([tensor_scales[dim] for dim in (1, 0)[: 1 + transform]])[None])
    else:
        scales = torch.stack([tensor_scales[dim] for dim in (1, 0)])[None]
    with careful_call(x, *factors.values()):
        bits = [draws()] if stochastic else ()
        results = nvfp4_cast([x], scales, form, dims, signs=sign_tensor, draws=bits, **factors)
    assert results.keys() == set(dims)
    for dim in dims:
        bits = None
        if stochastic:
            bits = rounding_bits(rounding_words(along[dim].shape[0], columns, KEY, STEP, RANK, MICROBATCH), dim)
        wide = along[dim] if dim == 1 else along[dim].t().contiguous()
        bits = bits if dim == 1 or bits is None else bits.t()
        data, scales = results[dim]
        if dim == 0 and form == "image":
            assert data.is_contiguous()
            data = data.t()
        assert_is_nvfp4((data, scales), nvfp4.cast(wide, tensor_scales[dim], bits), tensor_scales[dim], form)


def check_weight(w, form="codes", gain=None, tensor_scale=None) -> None:
    """Require the reference's bits in both orientations."""
    wide = product(w, column_factor=gain)
    if tensor_scale is None:
        tensor_scale = nvfp4.power_of_two_tensor_scale(wide)
    with careful_call(w, gain):
        got = nvfp4_weight([w], [tensor_scale], form, gain)
    assert_is_nvfp4(got[1], nvfp4.cast(wide, tensor_scale, tiles=True), tensor_scale, form)
    if form == "image":
        assert got[0].data is got[1].data
    else:
        assert_is_nvfp4(got[0], nvfp4.cast(pad(wide).t().contiguous(), tensor_scale, tiles=True), tensor_scale, form)
