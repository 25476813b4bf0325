"""Shared by the tests of experts: experts, counts of tokens, and PyTorch's grouped products of codes on a CPU."""

import torch
import torch.nn as nn
from torch.nn.functional import ScalingType, SwizzleType

from mxtrain.formats.mx.reference import dequantize, from_blocked
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.nn.experts import QuantizedExperts
from tests.support.layer_checks import draw, fill

UNEVEN = (40, 1, 0, 77, 32)


class Experts(nn.Module):
    """The parameters of TorchTitan's ``GroupedExperts``."""

    def __init__(self, dim: int, hidden: int, experts: int, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(experts, hidden, dim, dtype=dtype))
        self.w2 = nn.Parameter(torch.empty(experts, dim, hidden, dtype=dtype))
        self.w3 = nn.Parameter(torch.empty(experts, hidden, dim, dtype=dtype))


def quantized_experts(dim, hidden, experts, recipe="mxfp8", mode="reference", dtype=torch.float32) -> QuantizedExperts:
    return QuantizedExperts.from_experts(fill(Experts(dim, hidden, experts, dtype)), recipe=recipe, mode=mode)


class OfEqualCounts(nn.Module):
    """Two experts with one input, [..., D], of which each gets one half; the last row belongs to none."""

    def __init__(self, dim: int, hidden: int, recipe="mxfp8", mode="reference"):
        super().__init__()
        self.experts = quantized_experts(dim, hidden, 2, recipe, mode)

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        counts = torch.full((2,), (len(rows) - 1) // 2, device=x.device)
        return self.experts(rows, counts).view(x.shape)


def assert_same_sums(got: torch.Tensor, want: torch.Tensor) -> None:
    """The same products in another order: every row is near on its own. On a CPU few sums are in another order, if any.

    A block of a cast that holds rows of two experts would erase the smaller ones.
    """
    assert got.is_cuda or (got != want).sum() <= got.numel() / 1000
    error, norm = ((t.double()).flatten(0, -2).norm(dim=1) for t in (got.double() - want.double(), want))
    assert (error <= 2e-2 * norm + 1e-30).all()


def heavy_tailed(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Rows of very different magnitudes. Gaussian rows hide casts in which two experts share a block's scale."""
    rows = draw(shape[0], *(1 for _ in shape[1:]), seed=seed + 100)
    return (draw(*shape, seed=seed) * (2 * rows).exp()).to(dtype)


def decoded_grouped_mm(
    a, b, a_scales, a_kind, b_scales, b_kind, a_swizzle, b_swizzle, *, offs, output_dtype=torch.bfloat16
):
    """``scaled_grouped_mm`` of MXFP8 codes, by the layouts that PyTorch documents and checks, rounded once.

    What no group owns, and the result of a group without rows, is NaN, because GPUs leave it unwritten.
    """
    assert a_kind == b_kind == ScalingType.BlockWise1x32 and a_swizzle == b_swizzle == SwizzleType.SWIZZLE_32_4_4
    # What PyTorch checks before it knows a device,
    result = torch._scaled_grouped_mm(*(t.to("meta") for t in (a, b, a_scales, b_scales, offs)), out_dtype=output_dtype)
    # what its code for CUDA checks as well,
    assert a.shape[-1] % 16 == 0 and b.shape[-2] % 16 == 0 and b.shape[-1] % 16 == 0
    assert len(a_scales) >= len(a) and (b.ndim == 3 or len(b_scales) >= b.shape[1])
    # and what the kernels take for granted: one expert after the other.
    assert b.ndim == 2 or b.transpose(1, 2).is_contiguous()
    result = torch.full(result.shape, float("nan"), dtype=output_dtype)
    start = scales_before = columns_before = 0
    for e, end in enumerate(offs.tolist()):
        if b.ndim == 3:
            rows, k = end - start, a.shape[1]
            own = decode(a[start:end], a_scales.flatten()[scales_before:])
            scales_before += -(-rows // 128) * 128 * -(-k // 128) * 4
            result[start:end] = (own @ decode(b[e].t(), b_scales[e]).t()).to(output_dtype)
        elif end > start:
            parts = [
                decode(x[:, start:end], scales.flatten()[columns_before * -(-len(x) // 128) * 128 :])
                for x, scales in ((a, a_scales), (b.t(), b_scales))
            ]
            columns_before += -(-(end - start) // 128) * 4
            result[e] = (parts[0] @ parts[1].t()).to(output_dtype)
        start = end
    return result


def decode(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Codes [R, K] and scales that begin with theirs in tiles of 128 rows by 4 blocks -> values, fp32."""
    rows, columns = codes.shape[0], codes.shape[1] // 32
    tiles = scales[: -(-rows // 128) * 128 * -(-columns // 4) * 4]
    return dequantize(codes, from_blocked(tiles, rows, columns), MXFP8)
