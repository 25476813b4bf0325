"""What is drawn once from the job's seed and a layer's name, in plain Python: the same in every process and run.

A layer is named by its FQN in the model as built, before checkpointing, compilation, FSDP or a pipeline wrap it.
"""

import hashlib

HADAMARD_SIZE = 16


def hadamard_signs(seed: int, fqn: str) -> tuple[int, ...]:
    """The 16 signs, +1 or -1, of the random Hadamard transform on both wgrad operands of layer ``fqn``.

    Raises:
        ValueError: if ``seed`` is not an integer.
    """
    bits = _hash(b"hadamard signs", seed, fqn)
    return tuple(1 - 2 * (bits >> i & 1) for i in range(HADAMARD_SIZE))


def sign_mask(signs: tuple[int, ...]) -> int:
    """``signs`` in the lowest bits of one integer, the first in the lowest; a bit is set where the sign is -1."""
    return sum((sign < 0) << i for i, sign in enumerate(signs))


def rounding_key(seed: int, fqn: str) -> int:
    """The Philox key for stochastic rounding of the output gradient of layer ``fqn``.

    Between 0 and 2^63 - 1, so that it fits a signed integer.

    Raises:
        ValueError: if ``seed`` is not an integer.
    """
    return _hash(b"rounding", seed, fqn) >> 1


def _hash(purpose: bytes, seed: int, fqn: str) -> int:
    """64 bits of BLAKE2b of the seed and the name (RFC 7693); Python's ``hash`` differs from process to process."""
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ValueError(f"seed = {seed!r} is not an integer")
    digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")
