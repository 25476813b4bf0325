"""Exchanges of rows that gloo lacks: every process sends another number of rows to every other."""

import torch
import torch.distributed as dist

_all_to_all = dist.all_to_all


def use_single_exchanges() -> None:
    """Let ``all_to_all`` of lists of tensors be one exchange of rows on gloo, which takes equal shapes only."""
    dist.all_to_all = all_to_all


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group=None, async_op: bool = False):
    """As ``torch.distributed.all_to_all``, for tensors [R, ...]."""
    if dist.get_backend(group) != "gloo":
        return _all_to_all(outputs, inputs, group, async_op)
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), [*map(len, outputs)], [*map(len, inputs)], group)
    for output, part in zip(outputs, received.split([*map(len, outputs)])):
        output.copy_(part)
