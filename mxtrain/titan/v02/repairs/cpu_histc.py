"""Fault: mixtures of experts count tokens as integers, which PyTorch does on CUDA only. 0.3.0 counts in another way."""

import torch

_histc = torch.histc


def histc(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """``torch.histc`` that also counts integers below 2^24 on a CPU. As on CUDA, counts have the dtype of ``x``."""
    if x.is_floating_point() or x.is_cuda:
        return _histc(x, *args, **kwargs)
    return _histc(x.float(), *args, **kwargs).to(x.dtype)
