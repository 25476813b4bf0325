"""Collectives of tensor and expert parallelism, without gradients. They run eagerly and in compiled graphs.

``group`` is the name of a process group. Results are plain tensors that are ready to be read: kernels take no
asynchronous results. PyTorch's own wrappers return those in eager mode.
"""

from collections.abc import Sequence

import torch

from mxtrain.formats.matrices import Codes
from mxtrain.launch.functions import define_op
from mxtrain.launch.pytorch import collectives as _ops


def largest(amax: torch.Tensor, group: str | None) -> torch.Tensor:
    """Return the elementwise maximum of ``amax`` over the processes; ``amax`` itself without a group."""
    return amax if group is None else _ops.wait_tensor(_ops.all_reduce(amax, "max", group))


def sum_parts(part: torch.Tensor, group: str) -> torch.Tensor:
    """Return the sum of the processes' parts of a tensor on every process."""
    return _ops.wait_tensor(_ops.all_reduce(part.contiguous(), "sum", group))


def gather_tokens(x: torch.Tensor, group: str, processes: int) -> torch.Tensor:
    """Join shards [B, S / processes, ...] of sequences to [B, S, ...], in the order of the processes."""
    parts = _ops.wait_tensor(_ops.all_gather_into_tensor(x.contiguous(), processes, group))
    parts = parts.view(processes, *x.shape)
    return parts.transpose(0, 1).reshape(x.shape[0], processes * x.shape[1], *x.shape[2:])


def gather_parts(parts: Sequence[torch.Tensor], group: str, processes: int) -> list[torch.Tensor]:
    """Gather several matrices in one call, by the op ``GATHER_PARTS``: [R, C] of every process -> [processes, R, C]."""
    return GATHER_PARTS([part.contiguous() for part in parts], processes, group)


def _gather_parts(parts: list[torch.Tensor], processes: int, group: str) -> list[torch.Tensor]:
    gathered = _ops.all_gather_into_tensor_coalesced(parts, processes, group)
    return [_ops.wait_tensor(whole).view(processes, *part.shape) for whole, part in zip(gathered, parts)]


def _fake(parts, processes, group):
    return [part.new_empty(processes, *part.shape) for part in parts]


# An op of its own, so that policies of activation checkpointing can name it, and because torch.compile runs a plain
# collective in the forward if it can, and saves the result: a gather for the backward alone must stay there.
GATHER_PARTS = define_op("gather_parts(Tensor[] parts, int processes, str group) -> Tensor[]", _gather_parts, _fake)


def sum_tokens(x: torch.Tensor, group: str, processes: int) -> torch.Tensor:
    """Sum [B, S, ...] over the processes, and return this process's shard [B, S / processes, ...] of the sequences."""
    batch, length = x.shape[0], x.shape[1] // processes
    parts = x.reshape(batch, processes, length, *x.shape[2:]).transpose(0, 1).contiguous()
    parts = parts.view(processes * batch, length, *x.shape[2:])
    return _ops.wait_tensor(_ops.reduce_scatter_tensor(parts, "sum", processes, group))


def exchange_rows(x: torch.Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> torch.Tensor:
    """Send the next sent[i] rows of x [R, D] to each process i -> the rows for this one, received[i] from process i."""
    return _ops.wait_tensor(_ops.all_to_all_single(x.contiguous(), received, sent, group))


def gather_codes(codes: Codes, dim: int, batch: int, group: str, processes: int) -> Codes:
    """Join codes of shards [batch, S / processes] of sequences to those of whole ones.

    All have one tensor scale, or with ``dim`` 0 each row has its own.

    Args:
        dim: 0 if the rows of ``codes`` are tokens, 1 if its columns are tokens (S / processes is whole blocks).
    """
    own, of_rows = [part for part in codes[:2] if part is not None], codes.tensor_scale
    if of_rows is not None and of_rows.ndim == 1:
        own.append(of_rows.unsqueeze(1).view(torch.uint8))
    # As bytes, because gloo knows no float8, and gathers tensors of different dtypes wrongly.
    sent = [part.view(torch.uint8) if part.itemsize == 1 else part for part in own]
    joined = [_join(parts, dim, batch) for parts in gather_parts(sent, group, processes)]
    data, *scales = (whole.view(part.dtype) for whole, part in zip(joined, own))
    if len(own) == 3:
        of_rows = scales.pop().view(of_rows.dtype).squeeze(1)
    return codes._replace(data=data, scales=scales[0] if scales else None, tensor_scale=of_rows)


def _join(parts: torch.Tensor, dim: int, batch: int) -> torch.Tensor:
    """Join parts [processes, R, C] of every process along dimension ``dim`` of [R, C], sequence by sequence."""
    processes, rows, columns = parts.shape
    if dim == 0:
        return parts.view(processes, batch, rows // batch, columns).transpose(0, 1).reshape(-1, columns)
    return parts.view(processes, rows, batch, columns // batch).permute(1, 2, 0, 3).reshape(rows, -1)
