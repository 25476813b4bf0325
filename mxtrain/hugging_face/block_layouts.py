"""How compressed-tensors stores MXFP8 and NVFP4 weights, filled with the codes and scales that training multiplied.

Sources: compressed-tensors 0.20, and its readers in vLLM 0.33 and transformers 5.

* MXFP8: ``MXFP8QuantizationCompressor`` in compressed_tensors/compressors/mxfp8/base.py; in vLLM
  ``CompressedTensorsW8A8Mxfp8``, which also casts activations to MXFP8, as training did.
* NVFP4: ``NVFP4PackedCompressor`` in compressed_tensors/compressors/nvfp4/base.py; in vLLM
  ``CompressedTensorsW4A4Fp4(use_a16=True)``. Activations stay in bf16: a layout with NVFP4 activations needs a constant
  tensor scale for each linear, and training takes the scales of most linears from each activation.

vLLM also reads ModelOpt's layouts, but transformers does not.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from mxtrain.ops import mxfp8, nvfp4
from mxtrain.recipes.formats import MXFP8, NVFP4, BlockFormat
from mxtrain.recipes.recipe import Recipe
from mxtrain.reference import casts
from mxtrain.reference import nvfp4 as nvfp4_reference


@dataclass(frozen=True)
class Codes:
    """A weight [N, D] in a block format."""

    codes: torch.Tensor
    """MXFP8: float8_e4m3fn [N, D]. NVFP4: uint8 [N, D / 2], two codes per byte, the first in the low half."""
    scales: torch.Tensor
    """MXFP8: float8_e8m0fnu [N, D / 32]. NVFP4: float8_e4m3fn [N, D / 16]"""
    tensor_scale: torch.Tensor | None = None
    """NVFP4: fp32 [], a power of two"""

    def rows(self, order: torch.Tensor | None) -> "Codes":
        """Return the rows in another order, int64 [N]; None keeps the order."""
        if order is None:
            return self
        # Index bytes: not every PyTorch indexes 8-bit floats.
        codes, scales = (t.view(torch.uint8)[order].view(t.dtype) for t in (self.codes, self.scales))
        return Codes(codes, scales, self.tensor_scale)


@dataclass(frozen=True)
class Layout:
    """How compressed-tensors stores a block format."""

    block_format: BlockFormat
    compression: str
    """``format`` in compressed-tensors' config"""
    weights: dict
    """``QuantizationArgs`` of the weights"""
    activations: dict | None
    """``QuantizationArgs`` of the inputs; None if they stay in high precision"""
    cast: Callable[[torch.Tensor, Recipe], Codes]
    """Weight [N, D], any floating-point dtype, gain included -> its codes"""
    unify: Callable[[Sequence[Codes]], list[Codes] | None]
    """Codes of joined weights -> the same with one tensor scale; None if that is impossible"""
    tensors: Callable[[str, Codes], dict[str, torch.Tensor]]
    """Name of a linear and its codes -> the tensors to store"""
    values: Callable[[Codes, torch.dtype], torch.Tensor]


def _mxfp8_tensors(linear: str, codes: Codes) -> dict[str, torch.Tensor]:
    # E8M0 in the bytes of uint8: safetensors of older releases have no such dtype, and vLLM expects uint8.
    return {f"{linear}.weight": codes.codes, f"{linear}.weight_scale": codes.scales.view(torch.uint8)}


def _nvfp4_tensors(linear: str, codes: Codes) -> dict[str, torch.Tensor]:
    return {
        f"{linear}.weight_packed": codes.codes,
        f"{linear}.weight_scale": codes.scales,
        # A divisor, [1]. The inverse of a power of two is exact.
        f"{linear}.weight_global_scale": codes.tensor_scale.reciprocal().reshape(1),
    }


def with_one_tensor_scale(weights: Sequence[Codes]) -> list[Codes] | None:
    """Give NVFP4 weights the largest of their tensor scales, and block scales that leave all values unchanged.

    A block scale shrinks by the power of two by which its tensor scale grows. This is exact unless E4M3 runs out of
    small numbers: training's block scales are at least 2^-6, and E4M3 goes on to 2^-9 with fewer bits.

    Returns:
        The weights in their order; None if a block scale cannot be written exactly.
    """
    tensor_scale = torch.stack([weight.tensor_scale for weight in weights]).max()
    changed = []
    for weight in weights:
        wanted = weight.scales.float() * (weight.tensor_scale / tensor_scale)
        scales = wanted.to(torch.float8_e4m3fn)
        # A block of zeros may have any scale. Codes of zero differ in their signs only.
        is_zero = (weight.codes & 0x77).view(*scales.shape, -1).eq(0).all(-1)
        if not ((scales.float() == wanted) | is_zero).all():
            return None
        changed.append(Codes(weight.codes, scales, tensor_scale))
    return changed


def _quantization_args(bits: int, block_size: int, strategy: str, scale_dtype: str, dynamic: bool = False) -> dict:
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": block_size,
        "scale_dtype": scale_dtype,
        "dynamic": dynamic,
    }


LAYOUTS = {
    "mxfp8": Layout(
        block_format=MXFP8,
        compression="mxfp8-quantized",
        weights=_quantization_args(8, MXFP8.block_size, "group", "torch.uint8"),
        activations=_quantization_args(8, MXFP8.block_size, "group", "torch.uint8", dynamic=True),
        cast=lambda weight, recipe: Codes(*mxfp8.weight_codes(weight, recipe)),
        unify=list,
        tensors=_mxfp8_tensors,
        values=lambda codes, dtype: casts.dequantize(codes.codes, codes.scales, MXFP8, dtype),
    ),
    "nvfp4": Layout(
        block_format=NVFP4,
        compression="nvfp4-pack-quantized",
        weights=_quantization_args(4, NVFP4.block_size, "tensor_group", "torch.float8_e4m3fn"),
        activations=None,
        cast=lambda weight, recipe: Codes(*nvfp4.weight_codes(weight, recipe)),
        unify=with_one_tensor_scale,
        tensors=_nvfp4_tensors,
        values=lambda codes, dtype: nvfp4_reference.dequantize(codes.codes, codes.scales, codes.tensor_scale, dtype),
    ),
}
"""Value of --format -> its layout"""
