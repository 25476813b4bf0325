"""SwiGLU and its gradients: computed in fp32 (fp64 for fp64) and rounded once, to the dtype of gate.

PyTorch's eager operations round silu(gate) to bf16 before they multiply by up. Compiled operations do not. SwiGLU is
from Shazeer, *GLU Variants Improve Transformer*, arXiv 2002.05202.
"""

import torch

from mxtrain.formats.matrices import at_least_fp32


def swiglu(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """Return silu(gate) * up, element by element. gate and up [..., H], any float dtype -> [..., H], dtype of gate."""
    wide = at_least_fp32(gate)
    return (wide * torch.sigmoid(wide) * up).to(gate.dtype)


def swiglu_backward(dh: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of gate and up [..., H], in the dtype of gate, for the gradient ``dh`` of ``swiglu``."""
    wide = at_least_fp32(gate)
    s = torch.sigmoid(wide)
    dgate = at_least_fp32(dh) * up * s * (1 + wide * (1 - s))
    return dgate.to(gate.dtype), swiglu(gate, dh)
