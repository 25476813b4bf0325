"""Random bits for stochastic rounding: Philox4x32-10, counter-based, in plain PyTorch integers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123). The bits are
those of Triton's ``tl.philox(key, c0, c1, c2, c3)`` with uint32 words, and of ``tl.randint4x(key, offset)`` with
c0 = offset mod 2^32, c1 = offset / 2^32, c2 = c3 = 0.

Unsigned 32-bit words are held in int64, the one integer dtype with full arithmetic that holds them all.
"""

import torch

from mxtrain.rng.rounding_position import MAX_ELEMENTS

Word = int | torch.Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(key: Word, c0: Word, c1: Word, c2: Word, c3: Word) -> tuple[Word, Word, Word, Word]:
    """The four 32-bit words that Philox4x32-10 makes of a counter.

    Args:
        key: 64 bits; the lower half is the first key word. An integer, or an int64 tensor.
        c0, c1, c2, c3: counter words from 0 to 2^32 - 1, int64 tensors that broadcast, or integers.

    Returns:
        Four words from 0 to 2^32 - 1: int64 tensors of the counter's common shape, or integers if it has no tensor.
    """
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def _multiply(word: Word, factor: int) -> tuple[Word, Word]:
    """Upper and lower 32 bits of the product of two 32-bit words."""
    # By halves of the factor: the whole product overflows a signed 64-bit integer.
    upper, lower = word * (factor >> 16), word * (factor & 0xFFFF)
    return upper + (lower >> 16) >> 16, ((upper & 0xFFFF) << 16) + lower & _WORD


def rounding_words(
    rows: int,
    columns: int,
    key: Word,
    step: Word,
    rank: Word,
    microbatch: Word = 0,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """A 32-bit word of its own for every element of a matrix, whatever the order or the tiles it is worked on.

    The addressing rule. Element (row, column) has index e = row * columns + column, and gets word e mod 4 of
    ``philox`` with this key and these counter words:

    ==  =====================================================
    c0  e / 4, rounded down: up to 2^34 elements
    c1  the microbatch, or whatever else runs a layer's backward more than once a step
    c2  the training step
    c3  the rank
    ==  =====================================================

    Two addresses that differ in any of these have different counters, and layers have different keys. An output
    gradient [T, N] is indexed as it is stored, t * N + n: padding tokens adds indices and changes none. Nothing is
    drawn in sequence, so a resumed run gets the bits of the step that it repeats.

    Args:
        key: from ``mxtrain.rng.seeds.rounding_key``. Like ``step``, ``rank`` and ``microbatch`` an integer, or an int64
            tensor of no dimensions, which does not make ``torch.compile`` compile anew for every value.
        device: None for the default device.

    Returns:
        int64 [rows, columns], from 0 to 2^32 - 1.

    Raises:
        ValueError: if the matrix has more than 2^34 elements, or an integer does not fit in its word.
    """
    elements = rows * columns
    if elements > MAX_ELEMENTS:
        raise ValueError(f"[{rows}, {columns}] has {elements} elements, more than the {MAX_ELEMENTS} that have bits")
    for name, word in (("step", step), ("rank", rank), ("microbatch", microbatch)):
        if not isinstance(word, torch.Tensor) and not 0 <= word <= _WORD:
            raise ValueError(f"{name} = {word} is not from 0 to {_WORD}")
    fours = torch.arange((elements + 3) // 4, dtype=torch.int64, device=device)
    words = philox(key, fours, microbatch, step, rank)
    return torch.stack(words, 1).flatten()[:elements].view(rows, columns)


def rounding_bits(words: torch.Tensor, dim: int) -> torch.Tensor:
    """16 bits of each of ``rounding_words`` for the cast along ``dim``: the lower half for 1, the upper half for 0.

    A gradient is cast along both, and drawing words is most of the work: the halves of one are independent.
    """
    return words & 0xFFFF if dim == 1 else words >> 16
