import pytest
import torch

from mxtrain.ops import gemm, native_probe
from mxtrain.recipes.formats import MXFP8
from mxtrain.reference import casts, nvfp4
from mxtrain.reference.casts import from_blocked

K = native_probe.DEPTH


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    monkeypatch.setattr(native_probe, "DEVICE", "cpu")
    native_probe.fault_of_native_products.cache_clear()
    yield
    native_probe.fault_of_native_products.cache_clear()


def values(codes, scales, damage=lambda scales: scales):
    """What codes and scales in the blocked layout stand for; ``damage`` changes the scales before."""
    if codes.dtype == torch.float8_e4m3fn:
        return casts.dequantize(codes, damage(from_blocked(scales[0], codes.shape[0], K // 32)), MXFP8)
    codes = codes.view(torch.uint8)
    return nvfp4.dequantize(codes, damage(from_blocked(scales[0], codes.shape[0], K // 16)), scales[1])


def tensor_cores(damage=lambda scales: scales, only=None, seen=None):
    """A ``scaled_mm`` that multiplies what its operands stand for; operands of dtype ``only`` are damaged."""

    def scaled_mm(a, b, *, scale_a, scale_b, output_dtype, **_):
        if seen is not None:
            seen.append(a.dtype)
        change = damage if only in (None, a.dtype) else lambda scales: scales
        return (values(a, scale_a, change) @ values(b.t(), scale_b).t()).to(output_dtype)

    return scaled_mm


def test_right_products_have_no_fault_and_are_tried_once(monkeypatch):
    seen = []
    monkeypatch.setattr(gemm, "scaled_mm", tensor_cores(seen=seen))
    state = torch.get_rng_state()
    assert native_probe.fault_of_native_products() is None and native_probe.fault_of_native_products() is None
    assert seen == [torch.float8_e4m3fn, torch.float4_e2m1fn_x2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("only", "name"), [(torch.float8_e4m3fn, "MXFP8"), (torch.float4_e2m1fn_x2, "NVFP4")])
@pytest.mark.parametrize(("by", "dim"), [(1, 0), (1, 1), (128, 0), (4, 1)])
def test_scales_in_a_wrong_order_are_a_fault(only, name, by, dim, monkeypatch):
    """Also whole tiles of 128 x 4 scales."""
    swap = lambda scales: scales.view(torch.uint8).roll(by, dim).view(scales.dtype)  # noqa: E731
    monkeypatch.setattr(gemm, "scaled_mm", tensor_cores(swap, only))
    assert native_probe.fault_of_native_products().startswith(f"a trial product in {name} has a relative error of ")


def test_products_that_are_a_hundredth_too_large_are_a_fault(monkeypatch):
    right = tensor_cores()
    monkeypatch.setattr(gemm, "scaled_mm", lambda *args, **kwargs: right(*args, **kwargs) * 1.01)
    assert native_probe.fault_of_native_products() == "a trial product in MXFP8 has a relative error of 0.01"


def test_products_that_are_not_finite_are_a_fault(monkeypatch):
    monkeypatch.setattr(gemm, "scaled_mm", lambda a, b, **_: torch.full((a.shape[0], b.shape[1]), float("nan")))
    assert native_probe.fault_of_native_products() == "a trial product in MXFP8 has a relative error of nan"


@pytest.mark.parametrize("first_line", ["CUDA error: no kernel image is available", ""])
def test_products_that_fail_are_a_fault(first_line, monkeypatch):
    def scaled_mm(*_, **__):
        raise RuntimeError(f"{first_line}\nfor execution on the device" if first_line else "")

    monkeypatch.setattr(gemm, "scaled_mm", scaled_mm)
    found = native_probe.fault_of_native_products()
    assert found == f"a trial product in MXFP8 failed with RuntimeError: {first_line}"
