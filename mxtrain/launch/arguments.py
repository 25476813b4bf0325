"""The check of the tensors that public functions and layers are given."""

import torch


def check_tensor(name: str, x: torch.Tensor) -> None:
    """Raise TypeError for what is no tensor, such as a NumPy array, and ValueError for a sparse or nested tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} of type {type(x).__name__}: expected a torch.Tensor")
    if x.layout is not torch.strided or x.is_nested:
        kind = "a nested tensor" if x.is_nested else f"of layout {x.layout}"
        raise ValueError(f"{name} is {kind}: expected a dense tensor")
