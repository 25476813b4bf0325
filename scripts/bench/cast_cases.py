"""Shared by the cast benchmarks: shapes, the norm's RMS estimate in plain PyTorch, and checks."""

import torch
from kernel_benchmark import Shape

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.matrices import split_blocks

EPS = 1e-5
# Inputs x [T, D] of a norm.
NORM_SHAPES: tuple[Shape, ...] = (
    *((32768, 768), (16384, 2048), (8192, 4096)),
    *((32768, 4096), (8192, 8192), (4096, 16384)),
)
# Output gradients [T, N].
GRADIENT_SHAPES: tuple[Shape, ...] = (
    *((16384, 2048), (16384, 8192), (65536, 768)),
    *((65536, 2048), (16384, 4096), (16384, 14336)),
)
# Inputs x [T, D] that wgrad casts along the tokens.
INPUT_SHAPES: tuple[Shape, ...] = ((65536, 768), (16384, 2048), (16384, 4096), (16384, 8192))
# Weights [N, D].
WEIGHT_SHAPES: tuple[Shape, ...] = ((2048, 768), (2048, 2048), (8192, 2048), (4096, 4096), (14336, 4096))


def random_rho(rows: int, device: str) -> torch.Tensor:
    """Return inverse RMS values in [0.5, 1.5), fp32 [rows]."""
    return torch.rand(rows, device=device) + 0.5


def inverse_rms_in_fp32(x: torch.Tensor, estimate: RMSEstimate) -> torch.Tensor:
    """Return rho of MXNorm with p = 2, as fp32 PyTorch operations: [T, D] -> [T]."""
    amax = split_blocks(x, estimate.block_size).abs().amax(-1).float()
    return torch.rsqrt(amax.square().mean(-1) / estimate.constant**2 + estimate.eps)


def within_ulps(a: torch.Tensor, b: torch.Tensor, ulps: int) -> bool:
    """Return whether two positive fp32 tensors differ by at most ``ulps`` units in the last place."""
    return bool(((a.view(torch.int32) - b.view(torch.int32)).abs() <= ulps).all())
