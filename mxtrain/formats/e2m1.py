"""E2M1, the elements of 4-bit formats, in plain PyTorch: rounded, packed two a byte, and decoded."""

import torch

from mxtrain.formats.matrices import split_blocks

_MAX = 6.0


def encode(y: torch.Tensor, bits: torch.Tensor | None = None) -> torch.Tensor:
    """Encode fp32 as E2M1, saturating at 6: one code per byte, shape of ``y``. NaN becomes zero.

    Rounds to nearest, ties to even; with bits, int64 in [0, 2^16), as if they were added to the fraction.
    """
    magnitude = y.abs().clamp(max=_MAX).nan_to_num(nan=0.0)
    # Neighbors are 0.5 apart below 2, 1 apart below 4, then 2 apart. Position, in units of that distance, plus
    # ``first`` gives the code. ``first`` is even, so rounding ties to an even position gives an even code.
    # Sums of 0 and 1 in the place of torch.where, which takes ten times as long on a CPU.
    below_2, below_4 = (magnitude < 2).float(), (magnitude < 4).float()
    position = magnitude * (0.5 + 0.5 * below_4 + below_2)
    first = 4 - 2 * (below_2 + below_4)
    if bits is None:
        steps = position.round()
    else:
        steps = (((position * 2.0**16).round() + bits) * 2.0**-16).floor()  # every number is exact in fp32
    return (first + steps).to(torch.uint8) | (y.signbit().to(torch.uint8) << 3)


def pack(elements: torch.Tensor) -> torch.Tensor:
    """Pack [..., D] codes, one per byte, into [..., D / 2], two per byte, the first in the low half."""
    pairs = split_blocks(elements, 2)
    return pairs[..., 0] | (pairs[..., 1] << 4)


def elements(device: torch.device) -> torch.Tensor:
    """Return the values of all codes, fp32 [16]: 0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with bit 3, the sign."""
    # Ranges, because a compiled graph keeps one of equal calls, but every constant tensor.
    ranges = ((0.0, 2.0, 0.5), (2.0, 4.0, 1.0), (4.0, 8.0, 2.0))
    magnitudes = torch.cat([torch.arange(*ends, dtype=torch.float32, device=device) for ends in ranges])
    return torch.cat([magnitudes, -magnitudes])


def decode(packed: torch.Tensor) -> torch.Tensor:
    """Return the values of packed codes, uint8 [..., D / 2] -> fp32 [..., D]."""
    values = elements(packed.device)
    pairs = torch.stack([values.repeat(16), values.repeat_interleave(16)], 1)  # the two elements of every byte
    return pairs.index_select(0, packed.flatten().int()).view(*packed.shape[:-1], 2 * packed.shape[-1])
