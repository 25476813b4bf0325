"""Buffers that a pass beside training must not change: mixtures of experts count the tokens of every forward in one."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def kept_buffers(parts: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Give the buffers of a model, or of its parts, their values back after the context."""
    buffers = [(buffer, buffer.clone()) for part in parts for buffer in part.buffers()]
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
