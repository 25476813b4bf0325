"""Rows in groups, and grouped products: every expert's part is the product of its own operands."""

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torchao.prototype.moe_training.kernels.mxfp8.quant import (
    torch_to_blocked_2d_K_groups,
    torch_to_blocked_2d_M_groups,
    torch_to_blocked_per_group_3d,
)

from mxtrain.formats import gemm
from mxtrain.formats.gemm import block_of_rows, collect, make_groups, matmul, matmul_rows, matmul_tokens
from mxtrain.formats.matrices import Operand, rows_in_order
from mxtrain.formats.mx import ops as mxfp8
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.parse import get_recipe
from tests.support.casts import cast
from tests.support.expert_checks import UNEVEN, assert_same_sums, decoded_grouped_mm, heavy_tailed

RECIPE = get_recipe("mxfp8")
COUNTS = {
    "uneven": UNEVEN,
    "one token": (0, 0, 1),
    "all on one": (0, 150, 0),
    "none": (0, 0, 0),
    "one expert": (33,),
    "64": tuple(e * e % 97 for e in range(64)),
}
PRODUCTS = [(matmul_rows, "fprop"), (matmul_rows, "dgrad"), (matmul_tokens, "wgrad")]

pytestmark = pytest.mark.usefixtures("device")


def bounds(ends: torch.Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("beyond", [0, 9])
@pytest.mark.parametrize("counts", COUNTS.values(), ids=COUNTS)
def test_rows_lie_in_whole_blocks_of_their_expert_and_come_back(counts, beyond, block):
    total = sum(counts)
    x = torch.arange(1.0, 1 + total + beyond)[:, None] * torch.ones(1, 3)
    x[total:] = float("nan")
    groups = make_groups(torch.tensor(counts), len(x), block)
    rows = rows_in_order(x, groups.source)
    assert len(rows) % block == 0 and groups.ends.dtype == torch.int32
    first = 0
    for count, (start, end) in zip(counts, bounds(groups.ends), strict=True):
        assert end - start == max(1, -(-count // block)) * block
        assert torch.equal(rows[start : start + count], x[first : first + count])
        assert not rows[start + count : end].any()
        first += count
    rows[groups.ends[-1] :] = float("nan")  # whatever a product left there
    back = collect(rows, groups)
    assert torch.equal(back[:total], x[:total]) and len(back) == len(x) and not back[total:].any()


def test_groups_are_made_without_a_look_at_the_counts():
    """On the meta device there is nothing to look at: nothing waits for a GPU."""
    groups = make_groups(torch.empty(4, device="meta"), 100, 32)
    x = torch.empty(100, 8, device="meta")
    assert collect(rows_in_order(x, groups.source), groups).shape == x.shape


def operands(counts, mode, rows, dim, dtype=torch.float32):
    """One GEMM each way: groups, and by GEMM its two operands. Weights are [E, rows, dim], tokens [P, ...]."""
    groups = make_groups(torch.tensor(counts), sum(counts) + 5, block_of_rows("native"))
    x, dy = (rows_in_order(heavy_tailed(sum(counts) + 5, n, seed=n, dtype=dtype), groups.source) for n in (dim, rows))
    w = heavy_tailed(len(counts) * rows, dim, seed=1, dtype=dtype)
    return groups, {
        "fprop": [cast([t], RECIPE, mode, (1,))[1] for t in (x, w)],
        "dgrad": [cast([dy], RECIPE, mode, (1,))[1], cast([w], RECIPE, mode, (0,))[0]],
        "wgrad": [cast([t], RECIPE, mode, (0,))[0] for t in (dy, x)],
    }


def products(groups, by_gemm, out_dtype):
    """The results of the three GEMMs, without the rows that belong to no expert."""
    y, dx, dw = (multiply(*by_gemm[name], groups.ends, out_dtype) for multiply, name in PRODUCTS)
    return [y[: groups.ends[-1]], dx[: groups.ends[-1]], dw]


@pytest.mark.parametrize(
    ("mode", "out_dtype"),
    [("reference", torch.float32), ("emulated", torch.float32), ("emulated", torch.bfloat16)],
    ids=str,
)
def test_products_of_values_are_those_of_every_expert(mode, out_dtype):
    rows, dim, experts = 96, 64, len(UNEVEN)
    groups, by_gemm = operands(UNEVEN, mode, rows, dim)
    w, w_t = by_gemm["fprop"][1].data.view(experts, rows, dim), by_gemm["dgrad"][1].data.view(dim, experts, rows)
    dy_t, x_t = (operand.data for operand in by_gemm["wgrad"])
    want = [[], [], []]
    for e, (start, end) in enumerate(bounds(groups.ends)):
        own = slice(start, end)
        want[0].append(matmul(by_gemm["fprop"][0].data[own], w[e], out_dtype))
        want[1].append(matmul(by_gemm["dgrad"][0].data[own], w_t[:, e], out_dtype))
        want[2].append(matmul(dy_t[:, own], x_t[:, own], out_dtype))
    want = [torch.cat(want[0]), torch.cat(want[1]), torch.stack(want[2])]
    for got, expected in zip(products(groups, by_gemm, out_dtype), want, strict=True):
        assert got.dtype == out_dtype
        assert_same_sums(got, expected)


@pytest.mark.parametrize("device", ["cpu"], indirect=True)
@pytest.mark.parametrize("counts", [(130, 1, 0, 300), (0, 0), (7,)], ids=str)
def test_native_operands_decode_to_the_products_of_every_expert(counts, device, monkeypatch):
    """In the layouts of PyTorch's and torchao's grouped products. No result comes from a group without rows."""
    found = []

    def spy(a, b, a_scales, a_kind, b_scales, *args, **kwargs):
        found.append((a_scales, b_scales))
        return decoded_grouped_mm(a, b, a_scales, a_kind, b_scales, *args, **kwargs)

    monkeypatch.setattr(gemm, "scaled_grouped_mm", spy)
    monkeypatch.setattr(mxfp8, "runs_kernels", lambda *_: False)  # interpreted, they take long
    rows, dim, experts = 256, 384, len(counts)
    groups, native = operands(counts, "native", rows, dim)
    _, reference = operands(counts, "reference", rows, dim)
    got, want = products(groups, native, torch.bfloat16), products(groups, reference, torch.bfloat16)
    assert all(torch.equal(a, b) and b.any() == (sum(counts) > 0) for a, b in zip(got, want, strict=True))
    with FakeTensorMode(allow_non_fake_inputs=True):  # as torch.compile does
        fakes = [multiply(*native[name], groups.ends, torch.bfloat16) for multiply, name in PRODUCTS]
    assert [(fake.shape, fake.dtype) for fake in fakes] == [
        ((len(groups.source), rows), torch.bfloat16),
        ((len(groups.source), dim), torch.bfloat16),
        ((experts, rows, dim), torch.bfloat16),
    ]

    ends, last = groups.ends, int(groups.ends[-1])
    for (a_scales, b_scales), name in zip(found[:2], ("fprop", "dgrad"), strict=True):
        a, b = (scales_of(operand) for operand in native[name])
        same_bytes(a_scales[:last], torch_to_blocked_2d_M_groups(a[:last], ends)[0][:last])
        b = b.view(experts, rows, -1) if name == "fprop" else b.view(dim, experts, -1).transpose(0, 1)
        same_bytes(b_scales, torch_to_blocked_per_group_3d(b))
    for scales, operand in zip(found[2], native["wgrad"], strict=True):
        of_groups = torch_to_blocked_2d_K_groups(scales_of(operand)[:, : last // 32], ends // 32)[0]
        same = operand.data.shape[0] * last // 32  # beyond: torchao's padding, and our rows of no expert
        same_bytes(scales.flatten()[:same], of_groups.flatten()[:same])


def scales_of(operand: Operand) -> torch.Tensor:
    """Row by row."""
    return casts.from_blocked(operand.scales, operand.data.shape[0], operand.data.shape[1] // MXFP8.block_size)


def same_bytes(got, want):
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))
