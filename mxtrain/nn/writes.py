"""How often a tensor was written to: what was made from it before a write is out of date."""

import torch


def version(x: torch.Tensor) -> int | None:
    """Return the number of writes to x so far; None in compiled graphs and for inference tensors: these have none."""
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


def writes_to(x: torch.Tensor) -> tuple[int, int] | None:
    """Return the id of x and the number of writes to it so far; None if PyTorch does not count them."""
    writes = version(x)
    return None if writes is None else (id(x), writes)
