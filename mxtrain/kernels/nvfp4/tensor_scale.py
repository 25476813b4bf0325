"""The NVFP4 tensor scale of a matrix from the largest magnitudes of its parts, in one program.

In plain PyTorch a scale takes 15 operations. A Llama block has 34 scales, and their operations were half of the graph
that ``torch.compile`` got.
"""

import torch
import triton
import triton.language as tl

from mxtrain.kernels.checks import check_device
from mxtrain.kernels.integers import next_power_of_2
from mxtrain.kernels.launch import Launch, register_op
from mxtrain.recipes.formats import NVFP4_RANGE, NVFP4_TENSOR_SCALE_MIN
from mxtrain.untraced import untraced

_RANGE, _MIN = tl.constexpr(NVFP4_RANGE), tl.constexpr(NVFP4_TENSOR_SCALE_MIN)
# Numbers that the program reads at a time.
_MOST = 8192


@triton.jit
def _tensor_scale_kernel(maxima_ptr, scale_ptr, count, SIZE: tl.constexpr):
    # The bits of magnitudes have the order of the magnitudes, and those of NaN come last.
    largest = tl.zeros((SIZE,), tl.int32)
    for first in range(0, count, SIZE):
        at = first + tl.arange(0, SIZE)
        maxima = tl.load(maxima_ptr + at, mask=at < count, other=0.0)
        largest = tl.maximum(largest, maxima.to(tl.int32, bitcast=True))
    amax = tl.max(largest, 0).to(tl.float32, bitcast=True)
    scale = tl.maximum(tl.div_rn(amax, _RANGE), _MIN, propagate_nan=tl.PropagateNan.ALL)
    # The next power of two: carry any mantissa into the exponent, then drop the mantissa.
    bits = scale.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0x7F800000, (bits + 0x7FFFFF) & 0x7F800000, bits)
    tl.store(scale_ptr, bits.to(tl.float32, bitcast=True))


def _implementation(maxima: torch.Tensor) -> tuple[list[torch.Tensor], Launch | None]:
    scale = torch.empty((), dtype=torch.float32, device=maxima.device)
    count = maxima.numel()
    if isinstance(count, torch.SymInt):  # its bit length would give a compiled graph one number of tokens
        return [scale], None
    size = min(next_power_of_2(max(count, 1)), _MOST)
    return [scale], Launch(
        _tensor_scale_kernel, (1,), (maxima, scale, count), dict(SIZE=size, num_warps=max(size // 256, 1))
    )


_nvfp4_tensor_scale = register_op("nvfp4_tensor_scale(Tensor maxima) -> Tensor[]", _implementation)


@untraced
def nvfp4_tensor_scale(maxima: torch.Tensor) -> torch.Tensor:
    """Return the tensor scale of a matrix, fp32 []: that of ``reference.nvfp4.power_of_two_tensor_scale``.

    Args:
        maxima: fp32, any shape: largest magnitudes of parts of the matrix (``nvfp4_amax``). NaN and infinity make the
            scale NaN and infinity. No maxima stand for a matrix of zeros.

    Raises:
        ValueError: for another dtype or device.
    """
    if maxima.dtype != torch.float32:
        raise ValueError(f"maxima {tuple(maxima.shape)} of {maxima.dtype}: expected float32")
    check_device("maxima", maxima)
    return _nvfp4_tensor_scale(maxima.contiguous())[0]
