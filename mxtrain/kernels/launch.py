"""How a kernel is launched, compiled in the background, and registered as a PyTorch op."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import torch
from triton.compiler import CompiledKernel

from mxtrain.custom_op import define_op
from mxtrain.kernels.device import INTERPRETED

_COMPILER = ThreadPoolExecutor(8, thread_name_prefix="mxtrain-compile")
_compiling: dict[tuple, Future] = {}
compiled_ahead: set[tuple] = set()
_compiled: dict[tuple, tuple[CompiledKernel, tuple]] = {}
# Op -> its implementation (``register_op``), for graphs that launch kernels themselves.
implementations: dict[Callable, Callable] = {}


def _kinds(args: tuple) -> tuple:
    """Return the properties of arguments on which a compiled kernel depends: for other properties Triton compiles anew.

    A pointer may be aligned to 16 bytes. An integer may be 1, a multiple of 16, or too large for 32 bits. A dtype
    stands for an aligned tensor.
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
        """The launch's constants, with floating-point fusion on unless they say otherwise.

        The default is stated because Triton's own changes: on up to 3.9, which warns about it, and off from 3.10.
        """
        return {"enable_fp_fusion": True, **self.constants}

    @property
    def options(self) -> set[str]:
        """Names of compile options besides the number of warps. Graphs launch kernels that have none themselves."""
        return self.constants.keys() - {*self.kernel.arg_names, "num_warps"}

    def run(self, device: torch.device) -> None:
        """Launch on the current stream of ``device``, after the kernel's compilation in the background has finished."""
        if device.type == "cuda" and device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self.run(device)
        # Triton takes 10 to 18 us to look up a kernel by its arguments and constants, this lookup takes 3. A compiled
        # kernel still reads a profiler's hooks at every launch.
        key = (self.kernel, device, *_kinds(self.args), *self.constants.items())
        if _compiling and (ahead := _compiling.get(key)):
            wait([ahead])
            _compiling.pop(key, None)
        compiled, constants = _compiled.get(key, (None, ()))
        if compiled is not None and not self.kernel.pre_run_hooks:
            compiled[(*self.grid, 1, 1)[:3]](*self.args, *constants)
            return
        compiled = self.kernel[self.grid](*self.args, **self.keywords)
        # The interpreter compiles nothing.
        if isinstance(compiled, CompiledKernel):
            constants = tuple(self.constants.get(name) for name in self.kernel.arg_names[len(self.args) :])
            _compiled[key] = compiled, constants

    def compile_ahead(self, device: torch.device) -> None:
        """Start compiling the kernel for these arguments in the background, once per set of argument properties.

        ``torch.compile`` asks an op for the shapes of its results while it traces. Compilation starts there, so the
        kernels of a graph compile side by side while tracing and code generation go on. Kernels without options are
        left to the graph, which compiles them as its own (``mxtrain.inductor.launches``).
        """
        dynamic = any(isinstance(a, torch.SymInt) for a in self.args)
        if dynamic or not self.options or device.type != "cuda" or not torch.cuda.is_available():
            return
        args = tuple(a.dtype if isinstance(a, torch.Tensor) else a for a in self.args)
        key = (self.kernel, device, *_kinds(args), *self.constants.items())
        if key not in compiled_ahead:
            compiled_ahead.add(key)
            _compiling[key] = _COMPILER.submit(_compile, self.kernel, args, self.keywords, device)


def _compile(kernel, args, keywords, device):
    with torch.cuda.device(device):
        # Reading ``run`` also loads the kernel onto the GPU.
        return kernel.warmup(*args, grid=(1,), **keywords).run


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

    Args:
        schema: the op's name, arguments and results.
        implementation: allocates the results, as the schema declares them, and returns them with the launches that fill
            them, in order. None means that nothing needs filling. Tracing calls it with fake tensors and compiles the
            launches ahead.
    """

    def run(*args):
        results, launches = implementation(*args)
        for launch in as_sequence(launches):
            launch.run(launch.args[0].device)
        return results

    def fake(*args):
        results, launches = implementation(*args)
        for launch in as_sequence(launches):
            launch.compile_ahead(launch.args[0].device)
        return results

    op = define_op(schema, run, fake, ("CPU", "CUDA") if INTERPRETED else ("CUDA",))
    implementations[op] = implementation
    return op
