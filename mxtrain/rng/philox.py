"""Random bits for stochastic rounding: the counter-based generator Philox4x32-10 in plain PyTorch integers.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011 (Random123). The bits equal
those of Triton's ``tl.philox(key, c0, c1, c2, c3)`` with uint32 words, and of ``tl.randint4x(key, offset)`` with
c0 = offset mod 2^32, c1 = offset / 2^32, c2 = c3 = 0.

Unsigned 32-bit words are stored in int64, the only integer dtype with full arithmetic that holds all of them.
"""

import torch

Word = int | torch.Tensor

_ROUNDS = 10
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_WORD = 0xFFFFFFFF


def philox(key: Word, c0: Word, c1: Word, c2: Word, c3: Word) -> tuple[Word, Word, Word, Word]:
    """Return four random 32-bit words for a counter.

    Args:
        key: 64 bits, an integer or an int64 tensor. The lower half is the first key word.
        c0, c1, c2, c3: counter words from 0 to 2^32 - 1: integers, or int64 tensors that broadcast.

    Returns:
        Four words from 0 to 2^32 - 1: int64 tensors of the common shape, or integers if all arguments are integers.
    """
    k0, k1 = key & _WORD, key >> 32 & _WORD
    for _ in range(_ROUNDS):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = k0 + _KEY_STEPS[0] & _WORD, k1 + _KEY_STEPS[1] & _WORD
    return c0, c1, c2, c3


def _multiply(word: Word, factor: int) -> tuple[Word, Word]:
    """Return the upper and lower 32 bits of the product of two 32-bit words."""
    # In int64 the product overflows, and keeps the right 64 bits.
    product = word * factor
    return product >> 32 & _WORD, product & _WORD


def rounding_words(
    rows: int,
    columns: int,
    key: Word,
    step: Word,
    rank: Word,
    microbatch: Word = 0,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """Return one random 32-bit word per element of a matrix. The words do not depend on order or tiling.

    Element (row, column) has index e = row * columns + column. Its word is word e mod 4 of ``philox`` with this key
    and these counter words:

    ==  =====================================================
    c0  floor(e / 4): up to 2^34 elements
    c1  the microbatch, which separates several backward passes in one step
    c2  the training step
    c3  the rank
    ==  =====================================================

    Different addresses have different counters, and different layers have different keys. An output gradient [T, N]
    is indexed as it is stored, t * N + n, so padding tokens only adds indices. Nothing is drawn in sequence: a resumed
    run gets the same bits for the same step.

    Args:
        key: from ``mxtrain.rng.seeds.rounding_key``. ``key``, ``step``, ``rank`` and ``microbatch`` are integers or
            int64 [] tensors; ``torch.compile`` recompiles for new integers, not for new tensor values.
        device: None for the default device.

    Returns:
        int64 [rows, columns], from 0 to 2^32 - 1.
    """
    elements = rows * columns
    fours = torch.arange((elements + 3) // 4, dtype=torch.int64, device=device)
    words = philox(key, fours, microbatch, step, rank)
    return torch.stack(words, 1).flatten()[:elements].view(rows, columns)


def rounding_words_of_rows(
    row: torch.Tensor, columns: int, key: torch.Tensor, step: torch.Tensor, rank: torch.Tensor, microbatch: torch.Tensor
) -> torch.Tensor:
    """Return the words of ``rounding_words`` for single rows of matrices that each have a key, int64 [R, columns].

    ``row`` is the place of each row in its own matrix, and ``columns`` (of all matrices) is a multiple of 4. The other
    numbers are those of each row. All are int64 [R].
    """
    fours = row.unsqueeze(1) * (columns // 4) + torch.arange(columns // 4, device=row.device)
    key, step, rank, microbatch = (numbers.unsqueeze(1) for numbers in (key, step, rank, microbatch))
    return torch.stack(philox(key, fours, microbatch, step, rank), 2).flatten(1)


def rounding_bits(words: torch.Tensor, dim: int) -> torch.Tensor:
    """Return 16 bits of each word for the cast along ``dim``: the lower half for dim 1, the upper half for dim 0.

    A gradient is cast along both dimensions. The halves of a word are independent, and drawing words is most of the
    work.
    """
    return words & 0xFFFF if dim == 1 else words >> 16
