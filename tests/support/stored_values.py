"""Decodes stored weights with arithmetic of its own: tables and powers of two, none of mxtrain's code."""

import torch

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def mxfp8_values(tensors: dict[str, torch.Tensor], linear: str) -> torch.Tensor:
    """[N, D] in fp32 from the tensors of one linear in compressed-tensors' "mxfp8-quantized"."""
    codes, exponents = tensors[f"{linear}.weight"], tensors[f"{linear}.weight_scale"]
    assert (codes.dtype, exponents.dtype) == (torch.float8_e4m3fn, torch.uint8)
    assert exponents.shape == (codes.shape[0], codes.shape[1] // 32)
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    return (codes.double() * scales).float()


def nvfp4_values(tensors: dict[str, torch.Tensor], linear: str) -> torch.Tensor:
    """[N, D] in fp32 from the tensors of one linear in compressed-tensors' "nvfp4-pack-quantized"."""
    packed, scales = tensors[f"{linear}.weight_packed"], tensors[f"{linear}.weight_scale"]
    divisor = tensors[f"{linear}.weight_global_scale"]
    assert (packed.dtype, scales.dtype, divisor.dtype) == (torch.uint8, torch.float8_e4m3fn, torch.float32)
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    assert scales.shape == (rows, columns // 16) and divisor.shape == (1,)
    return (_elements(packed) * scales.double().repeat_interleave(16, 1) / divisor.double()).float()


def mxfp4_values(tensors: dict[str, torch.Tensor], linear: str) -> torch.Tensor:
    """[N, D] in fp32 from the tensors of one linear in compressed-tensors' "mxfp4-pack-quantized"."""
    packed, exponents = tensors[f"{linear}.weight_packed"], tensors[f"{linear}.weight_scale"]
    assert (packed.dtype, exponents.dtype) == (torch.uint8, torch.uint8)
    scales = torch.exp2(exponents.double() - 127).repeat_interleave(32, 1)
    assert scales.shape == (packed.shape[0], 2 * packed.shape[1])
    return (_elements(packed) * scales).float()


def _elements(packed: torch.Tensor) -> torch.Tensor:
    table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
    return torch.stack([table[(packed % 16).long()], table[(packed // 16).long()]], 2).flatten(1)


VALUES = {"mxfp8": mxfp8_values, "mxfp4": mxfp4_values, "nvfp4": nvfp4_values}
