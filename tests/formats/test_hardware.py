import pytest
import torch

from mxtrain import ConfigError
from mxtrain.formats import gemm, hardware
from mxtrain.formats.hardware import MERGED, MODES, describe_modes, operand_mode, resolve_mode
from mxtrain.formats.mx import merged
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mx.reference import from_blocked
from mxtrain.formats.mxfp8 import MXFP8, MXFP8_E5M2
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import RECIPES
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs


@pytest.fixture
def capability(monkeypatch):
    def pretend(major, minor):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (major, minor))
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "a GPU")

    return pretend


@pytest.mark.parametrize(
    ("version", "best", "missing"),
    [
        ((10, 0), "native", []),
        ((11, 0), "native", []),
        ((9, 0), "emulated", ["native"]),
        ((8, 0), "emulated", ["native"]),
        ((7, 5), "reference", ["native", "emulated"]),
    ],
)
def test_auto_takes_the_best_mode_of_a_gpu(capability, version, best, missing, monkeypatch):
    capability(*version)
    monkeypatch.setattr(hardware, "fault_of", lambda fmt, mode="native": None)
    assert resolve_mode("auto", "cuda") == best
    assert [s.mode for s in describe_modes("cuda") if not s.available] == missing
    for mode in MODES:
        if mode in missing:
            with pytest.raises(ConfigError, match=f"mode = '{mode}' cannot run here: .*{version[0]}.{version[1]}"):
                resolve_mode(mode, "cuda")
        else:
            assert resolve_mode(mode, "cuda") == mode


@pytest.mark.parametrize("fault", [None, "a trial product in MXFP8 failed"])
def test_fp8_merged_asks_for_a_trial_product_and_is_never_auto(capability, fault, monkeypatch):
    capability(9, 0)
    asked = []
    monkeypatch.setattr(hardware, "fault_of", lambda fmt, mode: asked.append(mode) or fault)
    assert resolve_mode("auto", "cuda") == "emulated" and not asked
    if fault is None:
        assert resolve_mode(MERGED, "cuda") == MERGED
    else:
        with pytest.raises(ConfigError, match=f"mode = 'fp8_merged' cannot run here: {fault} "):
            resolve_mode(MERGED, "cuda")
    assert asked and {*asked} == {MERGED}


@pytest.mark.parametrize("fault", [None, "a trial product in NVFP4 has a relative error of 0.9"])
def test_compute_capability_12_is_native_if_trial_products_are_right(capability, fault, monkeypatch):
    capability(12, 0)
    monkeypatch.setattr("mxtrain.formats.hardware.fault_of_native_products", lambda: fault)
    assert resolve_mode("auto", "cuda") == ("native" if fault is None else "emulated")
    if fault is not None:
        with pytest.raises(ConfigError, match=f"mode = 'native' cannot run here: MX tensor cores found, but {fault} "):
            resolve_mode("native", "cuda")


def test_a_cpu_runs_kernels_in_the_interpreter_only(monkeypatch):
    for interprets in (True, False):
        monkeypatch.setattr(hardware, "_INTERPRETS_TRITON", interprets)
        assert hardware.runs_kernels("emulated", "cpu") == (interprets and hardware.HAS_TRITON)


def test_cpu():
    assert resolve_mode("auto", "cpu") == "reference"
    assert resolve_mode("emulated", "cpu") == "emulated"
    with pytest.raises(
        ConfigError, match="mode = 'native' cannot run here.*use 'auto' or one of: 'emulated', 'reference'"
    ):
        resolve_mode("native", "cpu")


def test_unknown_mode_and_device():
    with pytest.raises(ConfigError, match="mode = 'fast' is not one of: 'auto', 'native', 'emulated', 'reference'"):
        resolve_mode("fast", "cpu")
    with pytest.raises(ConfigError, match="device type 'tpu'"):
        resolve_mode("auto", "tpu")


K = hardware.DEPTH


def test_merged_trial(trial_on_the_cpu, monkeypatch):
    """Scales of groups in a wrong order are a fault."""
    assert hardware.fault_of(MXFP8, MERGED) is None
    hardware.fault_of.cache_clear()
    real = merged.merged_mm
    monkeypatch.setattr(merged, "merged_mm", lambda a, b, scales, *rest: real(a, b, scales.roll(1, 0), *rest))
    assert hardware.fault_of(MXFP8, MERGED).startswith("a trial product in MXFP8 has a relative error of ")


@pytest.fixture
def trial_on_the_cpu(monkeypatch):
    monkeypatch.setattr(hardware, "TRIAL_DEVICE", "cpu")
    hardware.fault_of.cache_clear()
    yield
    hardware.fault_of.cache_clear()


def values(codes, scales, damage=lambda scales: scales):
    """What codes and scales in the blocked layout stand for; ``damage`` changes the scales before."""
    for fmt in (MXFP8, MXFP8_E5M2):
        if codes.dtype == getattr(torch, fmt.element):
            return casts.dequantize(codes, damage(from_blocked(scales[0], codes.shape[0], K // 32)), fmt)
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


@pytest.mark.usefixtures("trial_on_the_cpu")
def test_right_products_have_no_fault_and_are_tried_once(monkeypatch):
    seen = []
    monkeypatch.setattr(gemm, "scaled_mm", tensor_cores(seen=seen))
    state = torch.get_rng_state()
    assert hardware.fault_of_native_products() is None and hardware.fault_of_native_products() is None
    assert seen == [torch.float8_e4m3fn, torch.float4_e2m1fn_x2]
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.usefixtures("trial_on_the_cpu")
@pytest.mark.parametrize(("only", "name"), [(torch.float8_e4m3fn, "MXFP8"), (torch.float4_e2m1fn_x2, "NVFP4")])
@pytest.mark.parametrize(("by", "dim"), [(1, 0), (1, 1), (128, 0), (4, 1)])
def test_scales_in_a_wrong_order_are_a_fault(only, name, by, dim, monkeypatch):
    """Also whole tiles of 128 x 4 scales."""
    swap = lambda scales: scales.view(torch.uint8).roll(by, dim).view(scales.dtype)  # noqa: E731
    monkeypatch.setattr(gemm, "scaled_mm", tensor_cores(swap, only))
    assert hardware.fault_of_native_products().startswith(f"a trial product in {name} has a relative error of ")


@pytest.mark.usefixtures("trial_on_the_cpu")
def test_products_that_are_not_finite_are_a_fault(monkeypatch):
    monkeypatch.setattr(gemm, "scaled_mm", lambda a, b, **_: torch.full((a.shape[0], b.shape[1]), float("nan")))
    assert hardware.fault_of_native_products() == "a trial product in MXFP8 has a relative error of nan"


@pytest.mark.usefixtures("trial_on_the_cpu")
@pytest.mark.parametrize("first_line", ["CUDA error: no kernel image is available", ""])
def test_products_that_fail_are_a_fault(first_line, monkeypatch):
    def scaled_mm(*_, **__):
        raise RuntimeError(f"{first_line}\nfor execution on the device" if first_line else "")

    monkeypatch.setattr(gemm, "scaled_mm", scaled_mm)
    found = hardware.fault_of_native_products()
    assert found == f"a trial product in MXFP8 failed with RuntimeError: {first_line}"


@pytest.mark.usefixtures("trial_on_the_cpu")
@pytest.mark.parametrize("takes_both", [True, False])
def test_e5m2_gradients_are_native_where_their_trial_product_is_right(takes_both, capability, monkeypatch):
    """Otherwise both operands of their GEMMs are values; those of fprop stay codes."""

    def scaled_mm(a, b, **kwargs):
        if a.dtype != b.dtype and not takes_both:
            raise ValueError("b must be float8_e5m2, too")
        return tensor_cores()(a, b, **kwargs)

    monkeypatch.setattr(gemm, "scaled_mm", scaled_mm)
    capability(10, 0)
    assert resolve_mode("native", "cuda") == "native" and hardware.fault_of_native_products() is None
    reason = hardware.mode_reason("native", "cuda")
    assert ("MX tensor cores found; MXFP8_E5M2 multiplies values (" in reason) != takes_both
    recipe = get_recipe("fprop=mxfp8, dgrad=mxfp8_e5m2, wgrad=mxfp8_e5m2")
    modes = [operand_mode(r, "native") for r in (recipe.fprop, recipe.dgrad, recipe.dgrad.of_gradients)]
    assert modes == ["native", *["native" if takes_both else "emulated"] * 2]
    assert operand_mode(RECIPES["mxfp4"], "native") == "emulated"
    with monkeypatch.context() as context:
        context.setattr(hardware, "fault_of", None)  # other modes try no products
        assert operand_mode(recipe.dgrad, "reference") == "reference"
    x = torch.randn(64, 64)
    gemms = ThreeGEMMs(recipe.key, "native", WHOLE)
    for_fprop, for_dgrad = map(gemms.quantize_weights([x], None).get, (1, 0))
    of_backward = for_dgrad, *gemms.quantize_gradients([x], True, True, None, [None]), gemms.quantize_along_tokens(x)
    assert for_fprop.scales is not None and {operand.scales is not None for operand in of_backward} == {takes_both}
