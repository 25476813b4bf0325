"""What launches are planned by: what the device can do, the row lengths that registers hold, and integer arithmetic."""

import functools

import torch
import triton

# Whether Triton runs kernels in its interpreter, on CPU tensors. Kernels read this setting when they are defined.
INTERPRETED = bool(triton.knobs.runtime.interpret)

# Streaming multiprocessors, and bytes of shared memory per program, of an H100: plans made without a GPU assume these.
H100_SMS, H100_SHARED_MEMORY = 132, 227 * 1024

# Row lengths that the norm kernels take, in elements. Rows longer than MAX_PERSISTENT_COLUMNS do not fit in a program's
# registers. They are read twice, the second time mostly from the L2 cache.
MAX_COLUMNS, MAX_PERSISTENT_COLUMNS = 65536, 16384


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def _has_capability(x: torch.Tensor, least: tuple[int, int]) -> bool:
    return x.is_cuda and not INTERPRETED and _capability(x.device.index) >= least


def converts_fp8(x: torch.Tensor) -> bool:
    """Return whether the device of ``x`` has an instruction that rounds to E4M3 (compute capability 8.9 and up)."""
    return _has_capability(x, (8, 9))


def converts_fp4(x: torch.Tensor) -> bool:
    """Return whether the device of ``x`` has an instruction that rounds to E2M1 (compute capability 10.0 and up)."""
    return _has_capability(x, (10, 0))


def overlaps_launches(x: torch.Tensor) -> bool:
    """Return whether a launch on the device of ``x`` can start before the launch ahead of it ends (9.0 and up)."""
    return _has_capability(x, (9, 0))


@functools.cache
def sm_count(device: torch.device) -> int:
    """Return the streaming multiprocessors of ``device``, or those of an H100 without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Return the bytes of shared memory that one program can use, or those of an H100 without a GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def check_row_length(x: torch.Tensor) -> None:
    """Raise ValueError for rows that are too long for the norm kernels. All other checks are those of the layers."""
    if x.shape[-1] > MAX_COLUMNS:
        raise ValueError(f"x {tuple(x.shape)}: expected rows of at most {MAX_COLUMNS} elements on a GPU")


# Integer arithmetic runs at every launch, and costs a hundredth of Triton's own.


def cdiv(a: int, b: int) -> int:
    """Return a / b rounded up."""
    return -(-a // b)


def round_up(a: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least a."""
    return -(-a // multiple) * multiple


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least n > 0."""
    return 1 << (n - 1).bit_length()
