"""Numbers drawn from the job's seed and the name of a layer or parameter: the same in every process and run.

The name is the FQN in the model as built, before checkpointing, compilation, FSDP or a pipeline wrap it.
"""

import hashlib
from numbers import Integral

HADAMARD_SIZE = 16


def hadamard_signs(seed: int, fqn: str) -> tuple[int, ...]:
    """Return the 16 signs, +1 or -1, of the random Hadamard transform on both wgrad operands of layer ``fqn``."""
    bits = _hash(b"hadamard signs", seed, fqn)
    return tuple(1 - 2 * (bits >> i & 1) for i in range(HADAMARD_SIZE))


def sign_mask(signs: tuple[int, ...]) -> int:
    """Pack ``signs`` into the lowest bits of an integer, the first sign lowest. A set bit means -1."""
    return sum((sign < 0) << i for i, sign in enumerate(signs))


def rounding_key(seed: int, fqn: str) -> int:
    """Return the Philox key for stochastic rounding of the output gradient of layer ``fqn``.

    The key is between 0 and 2^63 - 1, so it fits a signed integer.
    """
    return _hash(b"rounding", seed, fqn) >> 1


def weight_seed(seed: int, fqn: str, draw: int) -> int:
    """Return the seed, 64 bits, of a generator for draw number ``draw`` of the initial values of parameter ``fqn``."""
    return _hash(b"initial weights", seed, f"{draw}:{fqn}")


def _hash(purpose: bytes, seed: int, fqn: str) -> int:
    """Return 64 bits of BLAKE2b (RFC 7693) of seed and name. Python's ``hash`` differs between processes."""
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise ValueError(f"seed = {seed!r} is not an integer")
    if not isinstance(fqn, str):
        raise ValueError(f"fqn = {fqn!r} is not a string")
    digest = hashlib.blake2b(f"{seed}:{fqn}".encode(), digest_size=8, person=purpose).digest()
    return int.from_bytes(digest, "little")
