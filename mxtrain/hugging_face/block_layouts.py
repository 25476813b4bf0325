"""How compressed-tensors stores MXFP8 and NVFP4 weights, filled with the codes and scales that training multiplied.

Sources: compressed-tensors 0.20, and its readers in vLLM 0.33 and transformers 5.

* MXFP8: ``MXFP8QuantizationCompressor`` in compressed_tensors/compressors/mxfp8/base.py; in vLLM
  ``CompressedTensorsW8A8Mxfp8``, which also casts activations to MXFP8. The stored codes and scales are training's. A
  new cast may differ: compressed-tensors takes the next scale from a block maximum of exactly 448 times the scale on,
  training's RCEIL just above.
* NVFP4: ``NVFP4PackedCompressor`` in compressed_tensors/compressors/nvfp4/base.py; in vLLM
  ``CompressedTensorsW4A4Fp4(use_a16=True)``. Activations stay in bf16: a layout with NVFP4 activations needs a constant
  tensor scale for each linear, and training takes the scales of most linears from each activation.

vLLM also reads ModelOpt's layouts, but transformers does not.
"""

from collections.abc import Sequence
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
    """NVFP4: fp32 [], a power of two. MXFP8: None"""

    @classmethod
    def cast(cls, weight: torch.Tensor, recipe: Recipe) -> "Codes":
        """Cast a weight [N, D] of any floating-point dtype, gain included."""
        return cls(*(mxfp8 if recipe.format == MXFP8 else nvfp4).weight_codes(weight, recipe))

    def rows(self, order: torch.Tensor | None) -> "Codes":
        """Return the rows in another order, int64 [N]; None keeps the order."""
        if order is None:
            return self
        # Index bytes: not every PyTorch indexes 8-bit floats.
        codes, scales = (t.view(torch.uint8)[order].view(t.dtype) for t in (self.codes, self.scales))
        return Codes(codes, scales, self.tensor_scale)

    def values(self, dtype: torch.dtype) -> torch.Tensor:
        """Return the values [N, D] that training multiplied, which bf16 holds exactly."""
        if self.tensor_scale is None:
            return casts.dequantize(self.codes, self.scales, MXFP8, dtype)
        return nvfp4_reference.dequantize(self.codes, self.scales, self.tensor_scale, dtype)

    def tensors(self, linear: str) -> dict[str, torch.Tensor]:
        """Return the tensors to store for a linear of this name."""
        if self.tensor_scale is None:
            # E8M0 in the bytes of uint8: safetensors of older releases have no such dtype, and vLLM expects uint8.
            return {f"{linear}.weight": self.codes, f"{linear}.weight_scale": self.scales.view(torch.uint8)}
        return {
            f"{linear}.weight_packed": self.codes,
            f"{linear}.weight_scale": self.scales,
            # A divisor, [1]. The inverse of a power of two is exact.
            f"{linear}.weight_global_scale": self.tensor_scale.reciprocal().reshape(1),
        }


def with_one_tensor_scale(weights: Sequence[Codes]) -> list[Codes] | None:
    """Give NVFP4 weights the largest of their tensor scales, and block scales that leave all values unchanged.

    MXFP8 weights have no tensor scale, and stay as they are.

    A block scale shrinks by the power of two by which its tensor scale grows. This is exact unless E4M3 runs out of
    small numbers: training's block scales are at least 2^-6, and E4M3 goes on to 2^-9 with fewer bits.

    Returns:
        The weights in their order; None if a block scale cannot be written exactly.
    """
    if weights[0].tensor_scale is None:
        return list(weights)
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


LAYOUTS = {
    "mxfp8": Layout(
        block_format=MXFP8,
        compression="mxfp8-quantized",
        weights=_quantization_args(8, MXFP8.block_size, "group", "torch.uint8"),
        activations=_quantization_args(8, MXFP8.block_size, "group", "torch.uint8", dynamic=True),
    ),
    "nvfp4": Layout(
        block_format=NVFP4,
        compression="nvfp4-pack-quantized",
        weights=_quantization_args(4, NVFP4.block_size, "tensor_group", "torch.float8_e4m3fn"),
        activations=None,
    ),
}
"""Value of --format -> its layout"""
