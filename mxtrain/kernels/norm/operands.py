"""Checks of the operands of RMSNorm and LayerNorm."""

import torch

from mxtrain.kernels.checks import check_matrix, check_same, check_vector
from mxtrain.kernels.norm.rms_norm_plan import DTYPES, check_columns

_VECTORS = ("weight", "bias")
_NUMBERS = ("rstd", "mean")


def check_operands(x: torch.Tensor, **others: torch.Tensor | None) -> None:
    """Raise ValueError unless the kernels take x [T, D] and the others by name.

    weight and bias are [D], rstd and mean fp32 [T]; all others have the shape and device of x. Any of them may be None.
    """
    check_matrix("x", x, DTYPES)
    check_columns(x)
    for name, other in others.items():
        if other is None:
            continue
        if name in _VECTORS:
            check_vector(name, other, x.shape[1], x.device, DTYPES)
        elif name in _NUMBERS:
            check_vector(name, other, x.shape[0], x.device, (torch.float32,))
        else:
            check_matrix(name, other, DTYPES)
            check_same(name, other, "x", x)


def contiguous(x: torch.Tensor | None) -> torch.Tensor | None:
    """Return the operand without gaps between elements, as kernels read it; None for None."""
    return None if x is None else x.contiguous()
