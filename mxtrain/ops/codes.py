"""A quantized matrix as it is sent between processes: codes and block scales, in every execution mode."""

from typing import NamedTuple

import torch

from mxtrain.ops.collectives import gather_parts


class Codes(NamedTuple):
    """A matrix [R, K] quantized in blocks along K, the axis that a GEMM reduces over.

    Attributes:
        data: codes, float8_e4m3fn [R, K], or uint8 [R, K / 2] for NVFP4, two per byte. For a recipe without a format,
            the values [R, K].
        scales: row-major block scales, float8_e8m0fnu [R, K / 32] or float8_e4m3fn [R, K / 16]; None without a format.
        tensor_scale: NVFP4: the scale of the whole matrix, fp32 []. Otherwise None.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None
    tensor_scale: torch.Tensor | None = None


def gather_codes(codes: Codes, dim: int, batch: int, group: str, processes: int) -> Codes:
    """Join codes of shards [batch, S / processes] of sequences to those of whole ones; all have one tensor scale.

    Args:
        dim: 0 if the rows of ``codes`` are tokens, 1 if its columns are tokens (S / processes is whole blocks).
    """
    own = [codes.data] if codes.scales is None else [codes.data, codes.scales]
    # As bytes, because gloo knows no float8.
    sent = [part.view(torch.uint8) if part.itemsize == 1 else part for part in own]
    joined = [_join(parts, dim, batch) for parts in gather_parts(sent, group, processes)]
    data, *scales = (whole.view(part.dtype) for whole, part in zip(joined, own))
    return Codes(data, *scales or [None], codes.tensor_scale)


def _join(parts: torch.Tensor, dim: int, batch: int) -> torch.Tensor:
    """Join parts [processes, R, C] of every process along dimension ``dim`` of [R, C], sequence by sequence."""
    processes, rows, columns = parts.shape
    if dim == 0:
        return parts.view(processes, batch, rows // batch, columns).transpose(0, 1).reshape(-1, columns)
    return parts.view(processes, rows, batch, columns // batch).permute(1, 2, 0, 3).reshape(rows, -1)
