"""What every kernel file shares: how its op is registered, and what it asks of tensors and of their device."""

import contextlib
import functools
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
import triton

from mxtrain.recipes.formats import MXFP8
from mxtrain.recipes.recipe import Recipe

# Whether Triton runs kernels in its interpreter, on CPU tensors. It decides when a kernel is defined.
INTERPRETED = bool(triton.knobs.runtime.interpret)

BLOCK = MXFP8.block_size
# An H100, for plans made where there is no GPU: its streaming multiprocessors, and a program's shared memory in bytes.
H100_SMS, H100_SHARED_MEMORY = 132, 227 * 1024
FORMS = ("codes", "blocked", "image")
FLOAT_DTYPES = (torch.bfloat16, torch.float32)

_LIBRARY = torch.library.Library("mxtrain", "DEF")
_COMPILER = ThreadPoolExecutor(8, thread_name_prefix="mxtrain-compile")
_compiling: dict[tuple, Future] = {}
compiled_ahead: set[tuple] = set()


class Launch(NamedTuple):
    """One kernel launch: positional arguments are tensors, None or numbers, keywords are compile-time constants."""

    kernel: Callable
    grid: tuple[int, ...]
    args: tuple
    constants: dict

    @property
    def keywords(self) -> dict:
        """The constants and what holds for every kernel: a multiplication and an addition are one instruction, unless a
        kernel says otherwise. Triton 3.10 takes that back for kernels that say nothing, and 3.9 warns of it."""
        return {"enable_fp_fusion": True, **self.constants}

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of ``device``."""
        if _compiling:
            wait(list(_compiling.values()))
            _compiling.clear()
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self.kernel[self.grid](*self.args, **self.keywords)

    def compile_ahead(self, device: torch.device) -> None:
        """Start to compile the kernel for arguments like these in the background, unless that was done before.

        Called where ``torch.compile`` asks for the shapes of results: while it goes on to trace and to generate code,
        the kernels of the graph are compiled side by side.
        """
        dynamic = any(isinstance(a, torch.SymInt) for a in self.args)
        if dynamic or device.type != "cuda" or not torch.cuda.is_available():
            return
        args = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in self.args)
        # What Triton tells integers apart by.
        kinds = tuple(
            (a == 1, a % 16 == 0) if isinstance(a, int) else type(a) if isinstance(a, float) else a for a in args
        )
        key = (self.kernel, device.index, kinds, *self.constants.items())
        if key not in compiled_ahead:
            compiled_ahead.add(key)
            _compiling[key] = _COMPILER.submit(_compile, self.kernel, args, self.keywords, device)


def _compile(kernel, args, keywords, device):
    with torch.cuda.device(device):
        # Asking for ``run`` loads the kernel, too.
        return kernel.warmup(*args, grid=(1,), **keywords).run


def _one_by_one(launches: Launch | tuple[Launch, ...] | None) -> tuple[Launch, ...]:
    # A launch is a tuple itself.
    return (launches,) if isinstance(launches, Launch) else launches or ()


def register_op(
    schema: str, implementation: Callable[..., tuple[list[torch.Tensor], Launch | tuple[Launch, ...] | None]]
):
    """Register an op ``torch.ops.mxtrain.NAME`` and return it.

    Not by ``torch.library.custom_op``, whose checks in Python take 90 microseconds a call, several times a launch.
    There is no gradient: the autograd functions in ``mxtrain.nn`` call these ops forward and backward.

    Args:
        schema: the op's arguments and results, with its name.
        implementation: allocates the results and says what launch, or launches one after another, fill them (None:
            nothing to fill).
    """
    name = schema.partition("(")[0]

    def run(*args):
        results, launches = implementation(*args)
        for launch in _one_by_one(launches):
            launch.run(args[0].device)
        return results

    def fake(*args):
        results, launches = implementation(*args)
        for launch in _one_by_one(launches):
            launch.compile_ahead(args[0].device)
        return results

    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, run, "CUDA")
    if INTERPRETED:
        _LIBRARY.impl(name, run, "CPU")
    torch.library.register_fake(f"mxtrain::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.mxtrain, name).default


def cdiv(a: int, b: int) -> int:
    """a / b rounded up, in a hundredth of the time of ``triton.cdiv``, for what is asked at every launch."""
    return -(-a // b)


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is no less than n > 0; see ``cdiv``."""
    return 1 << (n - 1).bit_length()


@functools.cache
def _capability(device_index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device_index)


def converts_fp8(x: torch.Tensor) -> bool:
    """Whether the device of ``x`` rounds to E4M3 by an instruction of its own (compute capability 8.9 and up)."""
    return x.is_cuda and not INTERPRETED and _capability(x.device.index) >= (8, 9)


def overlaps_launches(x: torch.Tensor) -> bool:
    """Whether on the device of ``x`` a launch may start before the one that it waits for has ended (9.0 and up)."""
    return x.is_cuda and not INTERPRETED and _capability(x.device.index) >= (9, 0)


@functools.cache
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a device; those of an H100 where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100_SMS
    return torch.cuda.get_device_properties(device).multi_processor_count


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may have; those of an H100 where there is no GPU."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return H100_SHARED_MEMORY
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin


def check_matrix(name: str, x: torch.Tensor, dtypes=FLOAT_DTYPES) -> None:
    """Raise ValueError unless ``x`` is a matrix of one of ``dtypes`` where kernels can read it."""
    if x.ndim != 2:
        raise ValueError(f"{name} {tuple(x.shape)}: expected a matrix")
    if x.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"dtype {x.dtype} of {name} {tuple(x.shape)}: expected {names}")
    check_device(name, x)


def check_mxfp8(recipe: Recipe, block_size: int = BLOCK) -> None:
    """Raise ValueError unless the recipe casts to MXFP8, which is what kernels do, and blocks have its size."""
    if recipe.format != MXFP8 or block_size != BLOCK:
        raise ValueError(f"recipe {recipe} with blocks of {block_size}: expected MXFP8 and blocks of {BLOCK}")


def check_device(name: str, x: torch.Tensor) -> None:
    """Raise ValueError unless kernels can read ``x``."""
    if not (x.is_cuda or (INTERPRETED and x.device.type == "cpu")):
        raise ValueError(f"{name} {tuple(x.shape)} is on {x.device}: expected a CUDA device")


def check_vector(name: str, x: torch.Tensor, length: int, device: torch.device, dtypes=FLOAT_DTYPES) -> None:
    """Raise ValueError unless ``x`` has shape (length,) and one of ``dtypes``, on ``device``."""
    if x.shape != (length,) or x.dtype not in dtypes:
        names = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
        raise ValueError(f"{name} {tuple(x.shape)} of {x.dtype}: expected ({length},) of {names}")
    if x.device != device:
        raise ValueError(f"{name} {tuple(x.shape)} is on {x.device}: expected {device}")


def check_same(name: str, x: torch.Tensor, other_name: str, other: torch.Tensor) -> None:
    """Raise ValueError unless the two have the same shape and device."""
    if x.shape != other.shape or x.device != other.device:
        theirs = f"{other_name} {tuple(other.shape)} on {other.device}"
        raise ValueError(f"{name} {tuple(x.shape)} on {x.device} does not go with {theirs}")


def scales_shape(rows: int, blocks: int, form: str) -> tuple[int, ...]:
    """Shape of the E8M0 scales of [rows, blocks]: row-major, or padded to 128 x 4 and flat in the blocked layout."""
    if form == "codes":
        return (rows, blocks)
    return (-(-rows // 128) * 128 * (-(-blocks // 4) * 4),)


def empty_cast(rows: int, columns: int, form: str, device) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Uninitialised results of a cast of [rows, columns] along columns: codes and scales, or image and None."""
    if form == "image":
        return torch.empty(rows, columns, dtype=torch.bfloat16, device=device), None
    blocks = columns // BLOCK
    shape = scales_shape(rows, blocks, form)
    # The tensor cores read the padding of the blocked layout, so it must not hold NaN.
    padded = form == "blocked" and shape[0] != rows * blocks
    allocate = torch.zeros if padded else torch.empty
    codes = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=device)
    return codes, allocate(shape, dtype=torch.uint8, device=device).view(torch.float8_e8m0fnu)


def as_bytes(x: torch.Tensor | None) -> torch.Tensor | None:
    """Codes and scales as the bytes that kernels store; anything else as it is."""
    return x.view(torch.uint8) if x is not None and x.element_size() == 1 else x
