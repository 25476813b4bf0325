"""Products of operands, and the guard against TF32 and bf16 in products of fp32, and against partial sums in bf16."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from mxtrain import decompose_k_mm
from mxtrain.formats import gemm
from mxtrain.formats.gemm import full_precision, matmul, sum_bf16_products_in_fp32
from mxtrain.formats.matrices import Operand
from mxtrain.formats.mx.reference import from_blocked
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from tests.support.casts import cast

pytestmark = pytest.mark.usefixtures("device")

MXFP8, NVFP4, ROWS = get_recipe("mxfp8"), get_recipe("nvfp4"), get_recipe("nvfp4_row")


def draw(*shape, seed=0):
    x = torch.randn(*shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return x.to(torch.get_default_device())


def operands(m, n, k, recipe=MXFP8, mode="reference"):
    x, w = draw(m, k, seed=0) * torch.exp2(torch.arange(m) % 32 - 16.0)[:, None], draw(n, k, seed=1)
    return cast([x], recipe, mode, (1,))[1], cast([w], recipe, mode, (1,), role="weight")[1]


@pytest.mark.parametrize("mode", ["reference", "emulated"])
@pytest.mark.parametrize(("out_dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)])
def test_product_of_the_dequantized_values(mode, out_dtype, tolerance):
    for m, n, k in ((32, 64, 96), (1, 32, 32)):
        a, b = operands(m, n, k, mode=mode)
        exact = a.data.double() @ b.data.double().t()
        out = MXFP8.ops.matmul(a, b, out_dtype)
        assert out.dtype == out_dtype and (out.double() - exact).norm() <= tolerance * exact.norm()


@pytest.mark.parametrize(("recipe", "k"), [(MXFP8, 64), (NVFP4, 48), (ROWS, 48)], ids=["mxfp8", "nvfp4", "rows"])
def test_native_operands_fit_pytorchs_scaled_mm(recipe, k):
    """PyTorch's own shape and dtype checks of ``scaled_mm``, run without a GPU on fake tensors."""
    native = operands(22, 32, k, recipe, "native")
    with FakeTensorMode() as fake:
        a, b = (Operand(*(None if t is None else fake.from_tensor(t) for t in operand)) for operand in native)
        out = recipe.ops.matmul(a, b, torch.bfloat16)
    assert out.shape == (22, 32) and out.dtype == torch.bfloat16


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_scales_of_rows_multiply_the_fp32_product(out_dtype, monkeypatch):
    def scaled_mm(a, b, *, scale_a, scale_b, output_dtype, **_):
        assert output_dtype == torch.float32 and scale_a[1] == scale_b[1] == 1
        codes = (a, scale_a[0]), (b.t(), scale_b[0])
        values = [nvfp4.dequantize(data.view(torch.uint8), from_blocked(s, data.shape[0], 4)) for data, s in codes]
        return values[0] @ values[1].t()

    monkeypatch.setattr(gemm, "scaled_mm", scaled_mm)
    native, values = operands(22, 32, 64, ROWS, "native"), operands(22, 32, 64, ROWS, "reference")
    assert native[0].tensor_scale.shape == (22,) and native[1].tensor_scale.shape == ()
    out, want = ROWS.ops.matmul(*native, out_dtype), matmul(values[0].data, values[1].data, out_dtype)
    assert out.dtype == out_dtype
    torch.testing.assert_close(out, want, rtol=1e-5 if out_dtype == torch.float32 else 2**-7, atol=0)


SETTINGS = torch.backends.cuda.matmul
OF_CPU = torch.backends.mkldnn.matmul
CASES = [
    (torch.float32, "fp32_precision", "tf32", "ieee"),
    (torch.bfloat16, "allow_bf16_reduced_precision_reduction", True, False),
    (torch.float16, "allow_fp16_reduced_precision_reduction", True, False),
    (torch.float16, "allow_fp16_accumulation", True, False),
]


@pytest.fixture(autouse=True)
def restored():
    """Settings as they were, after the test."""
    before = {name: getattr(SETTINGS, name) for _, name, _, _ in CASES}
    of_cpu = OF_CPU.fp32_precision
    yield
    for name, value in before.items():
        setattr(SETTINGS, name, value)
    OF_CPU.fp32_precision = of_cpu


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """On a CPU, heed the settings as on a GPU."""
    to_change = gemm._to_change
    monkeypatch.setattr(gemm, "_to_change", lambda dtype, _: to_change(dtype, True))


@pytest.fixture
def during_products(monkeypatch):
    """Every setting during every call of torch.mm."""
    seen, mm = [], torch.mm

    def spy(*args, **kwargs):
        seen.append({name: getattr(SETTINGS, name) for _, name, _, _ in CASES})
        return mm(*args, **kwargs)

    monkeypatch.setattr(torch, "mm", spy)
    return seen


def gaussian_operands(dtype, rows=16):
    """Gaussian a [rows, 512] and b [8, 512], and their product in fp64."""
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn(n, 512, generator=generator, device="cpu") for n in (rows, 8))
    a, b = (t.to(torch.get_default_device(), dtype) for t in (a, b))
    return a, b, a.double() @ b.double().t()


@pytest.mark.parametrize(("dtype", "name", "lax", "strict"), CASES, ids=str)
def test_settings_of_cublas_during_a_product_and_after_it(dtype, name, lax, strict):
    """Of tensors that say they are on a GPU; a setting that is strict already stays, as do all after an error."""
    tensor = SimpleNamespace(is_cuda=True, dtype=dtype)
    for before in (lax, strict):
        setattr(SETTINGS, name, before)
        with full_precision(tensor):
            assert getattr(SETTINGS, name) == strict
        with pytest.raises(KeyError), full_precision(tensor):
            raise KeyError
        assert getattr(SETTINGS, name) == before
    setattr(SETTINGS, name, lax)
    with full_precision(SimpleNamespace(is_cuda=False, dtype=dtype)):
        assert getattr(SETTINGS, name) == lax


@pytest.mark.parametrize("lax", ["bf16", "tf32"])
def test_settings_of_onednn_during_a_product_and_after_it(lax):
    """Of fp32 tensors on a CPU; other dtypes need no setting there."""
    OF_CPU.fp32_precision = lax
    for dtype, expected in ((torch.float32, "ieee"), (torch.bfloat16, lax), (torch.float64, lax)):
        with full_precision(torch.empty(1, dtype=dtype, device="cpu")):
            assert OF_CPU.fp32_precision == expected
        assert OF_CPU.fp32_precision == lax


@pytest.mark.parametrize(("settings", "is_cuda"), [(SETTINGS, True), (OF_CPU, False)], ids=["cublas", "onednn"])
def test_a_precision_that_is_inherited_stays_so(settings, is_cuda, monkeypatch):
    before = torch.backends.fp32_precision
    try:
        settings.fp32_precision, torch.backends.fp32_precision = "none", "tf32"
        with full_precision(SimpleNamespace(is_cuda=is_cuda, dtype=torch.float32)):
            assert settings.fp32_precision == "ieee"
        assert settings.fp32_precision == "tf32"
        torch.backends.fp32_precision = "ieee"
        assert settings.fp32_precision == "ieee"
    finally:
        torch.backends.fp32_precision = before


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fp32_products_on_a_cpu_are_not_rounded_to_bf16(dtype, compiled):
    """Of a router and of values. Only a CPU that multiplies bf16 itself heeds the setting."""
    torch.set_default_device(None)
    a, b, exact = gaussian_operands(dtype, rows=64)  # oneDNN does not round smaller ones

    def router():
        return decompose_k_mm(a.data, b.data.t(), out_dtype=torch.float32)

    def values():
        return matmul(a, b, torch.float32)

    for call in (router, values):
        torch._dynamo.reset()
        torch.set_float32_matmul_precision("medium")
        try:
            found = (torch.compile(call, backend="aot_eager", fullgraph=True) if compiled else call)()
            assert torch.get_float32_matmul_precision() == "medium"
        finally:
            torch.set_float32_matmul_precision("highest")
        assert (found - exact).norm() <= 1e-6 * exact.norm()


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize(("dtype", "name", "lax", "strict"), CASES[:2], ids=str)
def test_products_of_values_are_guarded(dtype, name, lax, strict, compiled, during_products, compile_backend, device):
    """The reference's fp32 values and the emulation's bf16 values, whatever PyTorch is set to."""
    a, b, exact = gaussian_operands(dtype)
    multiply = torch.compile(matmul, backend=compile_backend, fullgraph=True) if compiled else matmul
    setattr(SETTINGS, name, lax)
    for out_dtype in (dtype, torch.bfloat16, torch.float32):
        during_products.clear()
        result = multiply(a, b, out_dtype)
        assert result.dtype == out_dtype
        assert (result.double() - exact).norm() <= (1e-6 if out_dtype == torch.float32 else 2**-8) * exact.norm()
        # A CPU widens bf16 values that have an fp32 result.
        widened = device == "cpu" and out_dtype.itemsize > dtype.itemsize
        assert widened or [now[name] for now in during_products] == [strict]
        assert getattr(SETTINGS, name) == lax


@pytest.mark.usefixtures("as_on_a_gpu")
def test_a_product_that_needs_no_guard_is_a_plain_mm():
    """TorchTitan's own selective activation checkpointing keeps the results of aten.mm, and of no op of ours."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            called.append(func)
            return func(*args, **(kwargs or {}))

    sum_bf16_products_in_fp32()
    called = []
    with Watch():
        matmul(*gaussian_operands(torch.bfloat16)[:2], torch.bfloat16)
    assert torch.ops.aten.mm.default in called and torch.ops.mxtrain.guarded_mm.default not in called


def test_bf16_values_of_no_tokens_have_an_fp32_product():
    """Under no tokens a weight's gradient is zero."""
    for m, k in ((0, 32), (16, 0)):
        a, b = torch.zeros(m, k, dtype=torch.bfloat16), torch.zeros(8, k, dtype=torch.bfloat16)
        product = matmul(a, b, torch.float32)
        assert product.shape == (m, 8) and product.dtype == torch.float32 and not product.any()


def test_meta_tensors_have_shapes():
    a, b = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((5, 8), (8, 3)))
    c = torch.ops.mxtrain.guarded_mm(a, b, torch.float32)
    assert c.is_meta and c.shape == (5, 3) and c.dtype == torch.float32
