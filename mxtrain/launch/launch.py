"""How a kernel is launched, and registered as a PyTorch op; and what launches are planned by."""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import triton
from triton.compiler import CompiledKernel

from mxtrain.launch.functions import define_op

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
        raise ValueError(f"x has shape {tuple(x.shape)}; rows on a GPU must have at most {MAX_COLUMNS} elements")


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


_compiled: dict[tuple, tuple[CompiledKernel, tuple]] = {}
# Op -> its implementation (``register_op``), for graphs that launch kernels themselves.
implementations: dict[Callable, Callable] = {}


def _kinds(args: tuple) -> tuple:
    """Return the properties of arguments on which a compiled kernel depends: for other properties Triton compiles anew.

    A pointer may be aligned to 16 bytes. An integer may be 1, a multiple of 16, or too large for 32 bits.
    """
    return tuple(
        (a.dtype if a.data_ptr() % 16 == 0 else (a.dtype,))
        if isinstance(a, torch.Tensor)
        else (a == 1, a % 16 == 0, a >= 2**31)
        if isinstance(a, int)
        else float
        if isinstance(a, float)
        else a
        for a in args
    )


class Launch(NamedTuple):
    """One kernel launch: positional arguments are tensors, None or numbers, keywords are compile-time constants."""

    kernel: Callable
    grid: tuple[int, ...]
    args: tuple
    """The first one is a tensor on the device of the launch"""
    constants: dict

    @property
    def keywords(self) -> dict:
        """The launch's constants, with floating-point fusion on: Triton's default is off from 3.10."""
        return {"enable_fp_fusion": True, **self.constants}

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of ``device``."""
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run(device)
        # Triton takes 10 to 18 us to look up a kernel by its arguments and constants, this lookup takes 3. A compiled
        # kernel still reads a profiler's hooks at every launch.
        key = (self.kernel, device, *_kinds(self.args), *self.constants.items())
        compiled, constants = _compiled.get(key, (None, ()))
        if compiled is not None and not self.kernel.pre_run_hooks:
            compiled[(*self.grid, 1, 1)[:3]](*self.args, *constants)
            return
        compiled = self.kernel[self.grid](*self.args, **self.keywords)
        # The interpreter compiles nothing.
        if isinstance(compiled, CompiledKernel):
            constants = tuple(self.constants.get(name) for name in self.kernel.arg_names[len(self.args) :])
            _compiled[key] = compiled, constants


def contiguous(*tensors: torch.Tensor | None) -> list[torch.Tensor | None]:
    """Return tensors without gaps between their elements, as most kernels read them. None stays None."""
    return [None if tensor is None else tensor.contiguous() for tensor in tensors]


def as_sequence(launches: Launch | Sequence[Launch] | None) -> Sequence[Launch]:
    """The launches as a sequence, which a Launch, a tuple itself, is not."""
    return (launches,) if isinstance(launches, Launch) else launches or ()


def register_op(
    schema: str,
    implementation: Callable[..., tuple[torch.Tensor | Sequence[torch.Tensor], Launch | Sequence[Launch] | None]],
):
    """Register the op ``torch.ops.mxtrain.NAME`` and return it.

    ``torch.library.triton_op`` would do the same, but takes 33 microseconds of CPU time per call more than a bare
    launch; this takes 7 and ``custom_op`` 9 (H200, torch 2.11, ``scripts/bench/op_overhead.py``). The op has no
    gradient: the autograd functions in ``mxtrain.nn`` call ops forward and backward.

    ``implementation`` allocates the results, as the schema declares them, and returns them with the launches that fill
    them, in order. None means that nothing needs filling. Tracing calls it with fake tensors.
    """

    def run(*args):
        results, launches = implementation(*args)
        for launch in as_sequence(launches):
            launch.run(launch.args[0].device)
        return results

    def fake(*args):
        return implementations[op](*args)[0]

    op = define_op(schema, run, fake, ("CPU", "CUDA") if INTERPRETED else ("CUDA",))
    implementations[op] = implementation
    return op
