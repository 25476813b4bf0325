"""The op behind ``mxtrain.decompose_k_mm``: every route against fp64, and which one is taken."""

import pytest
import torch

from mxtrain.formats.hardware import HAS_TRITON, runs_kernels
from mxtrain.nn.decompose_k import op as matmul
from mxtrain.nn.decompose_k import reference
from mxtrain.nn.decompose_k.op import check_operands, decompose_k_mm

if not HAS_TRITON:
    pytest.skip("without Triton there is one route", allow_module_level=True)

from mxtrain.nn.decompose_k import kernels as kernels_of_decompose_k
from mxtrain.nn.decompose_k.kernels import Choice, Plan

ROUTES = {
    "mm": None,
    "two launches": Plan(4, 16, 16, 32, 2, 1),
    "no tensor cores": Plan(1, 4, 4, 64, 4, 2),
}

pytestmark = pytest.mark.usefixtures("device")


def draw(*shape, seed, dtype=torch.float32):
    """The same numbers on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    return torch.randn(*shape, generator=generator, device="cpu").to(dtype).to(torch.get_default_device())


def operands(m, k, n, dtype=torch.float32):
    """a [m, k] and the transposed view of a weight [n, k]."""
    return draw(m, k, seed=0, dtype=dtype), draw(n, k, seed=1, dtype=dtype).t()


@pytest.fixture
def kernels(device):
    if not runs_kernels("emulated", device):
        pytest.skip("no kernels on this device: the reference is the only route")


def take(route, monkeypatch):
    """Have this route chosen, whatever the shape."""
    choice = Choice(ROUTES[route], "test")
    monkeypatch.setattr(kernels_of_decompose_k, "choose", lambda *args: choice)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_route_matches_fp64(route, dtype, monkeypatch):
    """No number of parts divides K."""
    take(route, monkeypatch)
    a, b = operands(9, 71, 6, dtype)
    wide, same = torch.float32, dtype
    for bias_dtype, epilogue, out_dtype in (
        (None, None, same),
        (None, None, wide),
        (None, "relu", same),
        (same, "sigmoid", wide),
        (wide, "softmax", wide),
        (wide, "softmax", same),
    ):
        bias = None if bias_dtype is None else draw(6, seed=2, dtype=bias_dtype)
        got = decompose_k_mm(a, b, bias, epilogue, out_dtype)
        want = reference.decompose_k_mm(a.double(), b.double(), None if bias is None else bias.double(), epilogue)
        assert got.dtype == out_dtype and got.is_contiguous()
        # One rounding of the result, and sums of 71 products in fp32.
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(out_dtype).eps, atol=1e-5)
    assert torch.equal(got, decompose_k_mm(a, b, bias, epilogue, out_dtype)), "the same bits every time"


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("route", ROUTES)
def test_strides(route, monkeypatch):
    """Those of a weight's gradient: transposed views, expanded operands, and no stride of 1."""
    take(route, monkeypatch)
    wide = draw(5, 66, seed=0)
    for a in (draw(5, 33, seed=0), draw(33, 5, seed=0).t(), wide[:, ::2], wide[:, :1].expand(5, 33), wide[:, 5:38]):
        for b in (draw(33, 3, seed=1), draw(3, 33, seed=1).t(), draw(33, 6, seed=1)[:, ::2]):
            torch.testing.assert_close(decompose_k_mm(a, b, None, None, torch.float32), a @ b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [(0, 8, 4), (3, 8, 0), (3, 0, 4), (0, 0, 0)])
@pytest.mark.parametrize("epilogue", [None, "softmax"])
def test_empty_operands(shape, epilogue):
    m, k, n = shape
    bias = draw(n, seed=2)
    got = decompose_k_mm(*operands(m, k, n, torch.bfloat16), bias, epilogue, torch.float32)
    want = bias if epilogue is None else bias.softmax(0)
    torch.testing.assert_close(got, want.expand(m, n))


@pytest.mark.usefixtures("kernels")
def test_the_plan_for_the_real_shape_decides_the_route(monkeypatch):
    asked, taken = [], []
    choose = kernels_of_decompose_k.choose
    monkeypatch.setattr(kernels_of_decompose_k, "choose", lambda *args: asked.append(args) or choose(*args))
    monkeypatch.setattr(kernels_of_decompose_k, "decompose_k", lambda *args: taken.append(args[-1]) or torch.empty(1))
    monkeypatch.setattr(matmul, "mm", lambda *args: taken.append(None) or torch.empty(1))
    for m in (3, 70):
        a, b = operands(m, 2048, 16, torch.bfloat16)
        for layout in ((a, b), (a, b.contiguous()), (a.t().contiguous().t(), b)):
            decompose_k_mm(*layout, None, None, torch.float32)
    a, b = operands(70, 512, 16, torch.bfloat16)
    decompose_k_mm(a, b, None, None, torch.float32)
    shapes = [(m, 16, 2048, torch.bfloat16, a.device) for m in (3, 70)]
    expected = [(*shape, along_k) for shape in shapes for along_k in (True, False, False)]
    assert asked == [*expected, (70, 16, 512, torch.bfloat16, a.device, True)]
    assert taken == [choose(*args).plan for args in asked]
    assert taken[0] != taken[1] == taken[2] and taken[-1] is None, "K of 512 is short"


def test_fp64_stays_fp64():
    a, b = operands(4, 50, 3)
    got = decompose_k_mm(a.double(), b.double(), None, None, torch.float64)
    torch.testing.assert_close(got, a.double() @ b.double(), rtol=1e-14, atol=1e-14)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("route", ROUTES)
def test_autocast_does_not_reach_into_the_op(route, monkeypatch):
    take(route, monkeypatch)
    a, b = operands(16, 96, 8)
    plain = decompose_k_mm(a, b, None, "sigmoid", torch.float32)
    with torch.autocast(a.device.type, torch.bfloat16):
        assert torch.equal(decompose_k_mm(a, b, None, "sigmoid", torch.float32), plain)


def test_tf32_is_not_used(monkeypatch, device):
    if device != "cuda":
        pytest.skip("TF32 is of GPUs")
    take("mm", monkeypatch)
    a, b = operands(64, 4096, 32)
    want = a.double() @ b.double()
    for setting in ("highest", "high"):
        torch.set_float32_matmul_precision(setting)
        try:
            got = decompose_k_mm(a, b, None, None, torch.float32)
            assert torch.get_float32_matmul_precision() == setting
        finally:
            torch.set_float32_matmul_precision("highest")
        assert (got - want).norm() < 1e-6 * want.norm()


ZEROS = {"a": (4, 8), "b": (8, 3), "bias": (3,)}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"a": (8,)}, r"a \(8,\) and b \(8, 3\) do not fit; they must be \[M, K\] and \[K, N\]"),
        ({"b": (3, 8)}, r"a \(4, 8\) and b \(3, 8\) do not fit"),
        ({"bias": (4,)}, r"bias \(4,\) of torch.float32 does not fit b \(8, 3\); it must be \(3,\)"),
    ],
)
def test_shapes_that_do_not_go_together(shapes, message):
    a, b, bias = (torch.zeros(shape) for shape in (ZEROS | shapes).values())
    with pytest.raises(ValueError, match=message):
        check_operands(a, b, bias, None, None)


@pytest.mark.parametrize(
    ("dtypes", "out_dtype", "message"),
    [
        (
            (torch.int32, torch.int32, None),
            None,
            "a is torch.int32 and b is torch.int32; both must be the same: bfloat16",
        ),
        ((torch.bfloat16, torch.float32, None), None, "a is torch.bfloat16 and b is torch.float32"),
        ((torch.bfloat16, torch.bfloat16, torch.float16), None, "bias .* of torch.float16 does not fit"),
        ((torch.bfloat16, torch.bfloat16, None), torch.float16, "out_dtype = torch.float16 does not fit operands of"),
    ],
)
def test_dtypes_that_do_not_go_together(dtypes, out_dtype, message):
    a, b, bias = (
        None if dtype is None else torch.zeros(shape).to(dtype) for shape, dtype in zip(ZEROS.values(), dtypes)
    )
    with pytest.raises(ValueError, match=message):
        check_operands(a, b, bias, None, out_dtype)


def test_an_unknown_epilogue_and_another_device():
    a, b = operands(4, 8, 3)
    with pytest.raises(ValueError, match="epilogue = 'gelu' is not one of: None, 'relu', 'sigmoid', 'softmax'"):
        check_operands(a, b, None, "gelu", None)
    with pytest.raises(ValueError, match="^bias is on meta; move it to .*, where a is"):
        check_operands(a, b, torch.zeros(3, device="meta"), None, None)
    with pytest.raises(ValueError, match="^b is on meta; move it to"):
        check_operands(a, b.to("meta"), None, None, None)
