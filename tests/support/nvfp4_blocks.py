"""Shared by the tests of the NVFP4 reference: inputs, the values of E2M1, and the installed torchao's cast."""

import torch

# E2M1 from the format's definition: bias 1, one mantissa bit, neither infinity nor NaN.
E2M1 = [0.0, 0.5] + [(1 + m / 2) * 2.0 ** (e - 1) for e in (1, 2, 3) for m in (0, 1)]


def draw(*shape: int, seed: int = 0, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


def draw_bits(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 2**16, shape, generator=torch.Generator().manual_seed(seed))


def block(*values: float) -> torch.Tensor:
    return torch.tensor([list(values) + [0.0] * (16 - len(values))], dtype=torch.float32)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def torchao_cast(x: torch.Tensor, tensor_scale) -> tuple[torch.Tensor, torch.Tensor]:
    """torchao's (codes, scales); torchao returns them in the other order."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize

    scales, codes = nvfp4_quantize(x, 16, torch.as_tensor(tensor_scale, dtype=torch.float32))
    return codes, scales.reshape(*x.shape[:-1], x.shape[-1] // 16)
