"""Launches, their compilation in the background, integer arithmetic, and device facts."""

import contextlib
import itertools
import threading
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mxtrain.kernels import device, launch
from mxtrain.kernels.launch import Launch
from mxtrain.kernels.nvfp4.cast import _nvfp4_cast_kernel, nvfp4_cast
from tests.support.kernel_checks import draw, gpu_only

CUDA = torch.device("cuda", 0)


class Kernel:
    """Records the arguments it is compiled for."""

    arg_names = ()

    def __init__(self, error: Exception | None = None):
        self.compiled, self.error = [], error

    def warmup(self, *args, grid, **constants):
        if self.error:
            raise self.error
        self.compiled.append((args, constants))
        return SimpleNamespace(run=None)


@pytest.fixture
def pretended_gpu(monkeypatch):
    """Make torch report a GPU. Tests launch nothing there, and the stand-in for a kernel compiles nothing."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(launch, "compiled_ahead", set())
    monkeypatch.setattr(launch, "_compiling", {})


def compile_ahead(kernel, *args, device=CUDA, **constants):
    Launch(kernel, (1,), args, constants).compile_ahead(device)
    for future in launch._compiling.values():
        future.result()


@pytest.mark.usefixtures("pretended_gpu")
def test_a_launch_is_compiled_once_per_specialization():
    kernel, x = Kernel(), torch.empty(4)
    compile_ahead(kernel, x, None, 160, WARPS=4)
    assert kernel.compiled == [((torch.float32, None, 160), {"WARPS": 4, "enable_fp_fusion": True})]
    compile_ahead(kernel, torch.empty(9), None, 320, WARPS=4)
    assert len(kernel.compiled) == 1
    others = [
        dict(args=(x.bfloat16(), None, 160), WARPS=4),
        dict(args=(x, x, 160), WARPS=4),
        dict(args=(x, None, 161), WARPS=4),
        dict(args=(x, None, 1), WARPS=4),
        dict(args=(x, None, 160), WARPS=8),
    ]
    for count, other in enumerate(others, 2):
        compile_ahead(kernel, *other.pop("args"), **other)
        assert len(kernel.compiled) == count


@pytest.mark.usefixtures("pretended_gpu")
def test_nothing_is_compiled_ahead_for_a_cpu_or_for_graphs_that_launch_the_kernel():
    kernel = Kernel()
    compile_ahead(kernel, torch.empty(4), device=torch.device("cpu"), WARPS=4)
    compile_ahead(kernel, torch.empty(4), num_warps=4)
    assert not kernel.compiled


class Slow(Kernel):
    """Compilation in the background lasts until ``go`` is set."""

    pre_run_hooks = ()

    def __init__(self, error: Exception | None = None):
        super().__init__(error)
        self.go = threading.Event()

    def warmup(self, *args, grid, **constants):
        assert self.go.wait(20)
        return super().warmup(*args, grid=grid, **constants)

    def __getitem__(self, grid):
        return lambda *args, **constants: super(Slow, self).warmup(*args, grid=grid, **constants)


@pytest.fixture
def current_gpu(pretended_gpu, monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: CUDA.index)


@pytest.mark.usefixtures("current_gpu")
def test_a_launch_waits_for_its_own_compilation_only():
    slow, quick = Slow(), Slow()
    quick.go.set()
    of_slow, of_quick = (Launch(kernel, (1,), (torch.empty(4),), {"WARPS": 4}) for kernel in (slow, quick))
    of_slow.compile_ahead(CUDA)
    of_quick.compile_ahead(CUDA)
    of_quick.run(CUDA)
    (waiting,) = launch._compiling.values()
    assert len(quick.compiled) == 2 and not waiting.done()
    threading.Timer(0.05, slow.go.set).start()
    of_slow.run(CUDA)
    assert len(slow.compiled) == 2 and waiting.done()


@pytest.mark.usefixtures("current_gpu")
def test_an_error_in_the_background_is_raised_again_where_the_kernel_is_launched():
    kernel = Slow(RuntimeError("out of shared memory"))
    kernel.go.set()
    step = Launch(kernel, (1,), (torch.empty(4),), {"WARPS": 4})
    step.compile_ahead(CUDA)
    with pytest.raises(RuntimeError, match="out of shared memory"):
        step.run(CUDA)
    assert not launch._compiling


class Compiled(CompiledKernel):
    """Stands for a compiled kernel, and records its launches."""

    packed_metadata = name = None
    module = function = 1

    def __init__(self, launches):
        def run(*args):
            launches.append((self, args))

        self._run, self.src = run, None

    def __del__(self):
        """No binary was loaded."""


def _kernel(x_ptr, y_ptr, n, eps, BLOCK: triton.language.constexpr):
    pass


@pytest.fixture
def launches(monkeypatch):
    """Return (kernel, launches): Triton looks up a kernel as on a GPU, and a stand-in for its compiler records."""
    launches, kernel = [], JITFunction(_kernel)

    def compile(key, *_):
        return kernel.device_caches[0][0].setdefault(key, Compiled(launches))

    gpu = SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 7,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
    )
    monkeypatch.setattr(driver, "_active", gpu)
    monkeypatch.setattr(kernel, "_do_compile", compile)
    monkeypatch.setattr(launch, "_compiled", {})
    return kernel, launches


def test_a_launch_runs_the_kernel_that_triton_compiled_for_its_arguments(launches):
    """In any order of calls: a kernel for aligned pointers or multiples of 16 must not run for other arguments."""
    kernel, launches = launches
    x = torch.empty(64)
    assert x.data_ptr() % 16 == 0
    tensors = (x, x[1:], x[4:], x.bfloat16(), x.bfloat16()[1:], x.to(torch.uint8), x.to(torch.uint8)[8:], None)
    integers = (0, 1, 2, 16, 17, 2**31 - 16, 2**31 - 1, 2**31, 2**31 + 1)
    cases = [
        *((a, b, 16, 1e-5, 32) for a, b in itertools.product(tensors, tensors)),
        *((x, x[1:], n, 1e-5, block) for n, block in itertools.product(integers, (32, 64))),
        (x, x, 16, 0.5, 32),
    ]
    for _ in range(2):
        for *args, block in cases:
            Launch(kernel, (3, 2), tuple(args), {"BLOCK": block}).run(torch.device("cpu"))
            ran, passed = launches[-1]
            assert passed[:4] == (3, 2, 1, 7), "the grid and the stream"
            assert all(a is b for a, b in zip(passed[9:], (*args, block), strict=True))
            expected = kernel[(3, 2)](*args, BLOCK=block, enable_fp_fusion=True)
            assert ran is expected, (args, block)
    assert len(set(map(id, (ran for ran, _ in launches)))) > 40


def test_a_known_kernel_runs_without_tritons_lookup_and_with_its_hooks(launches, monkeypatch):
    kernel, launches = launches
    lookups = []
    run = kernel.run
    monkeypatch.setattr(kernel, "run", lambda *args, **kwargs: lookups.append(args) or run(*args, **kwargs))
    step = Launch(kernel, (1,), (torch.empty(4), None, 16, 1e-5), {"BLOCK": 32})
    for count in range(1, 4):
        step.run(torch.device("cpu"))
        assert len(launches) == count and len(lookups) == 1
    for _, args in launches:
        assert args[7] is triton.knobs.runtime.launch_enter_hook and args[8] is triton.knobs.runtime.launch_exit_hook
    seen = []
    kernel.add_pre_run_hook(lambda *args, **kwargs: seen.append(kwargs["BLOCK"]))
    step.run(torch.device("cpu"))
    assert seen == [32] and len(launches) == 4


def test_floating_point_fusion_is_on_unless_a_launch_turns_it_off():
    assert Launch(None, (1,), (), {"BLOCK": 32}).keywords == {"BLOCK": 32, "enable_fp_fusion": True}
    assert Launch(None, (1,), (), {"enable_fp_fusion": False}).keywords == {"enable_fp_fusion": False}


@gpu_only
@pytest.mark.usefixtures("device")
def test_the_kernel_compiled_ahead_is_the_kernel_launched():
    x, kernels = draw(96, 224), _nvfp4_cast_kernel.device_caches[torch.cuda.current_device()][0]
    # No other test compiles the kernel for these dtypes of the factors.
    factors = dict(row_factor=draw(96, dtype=torch.bfloat16), column_factor=draw(224))
    scale = torch.ones(1, device=x.device)
    mode = FakeTensorMode()
    with mode:
        fakes = {name: mode.from_tensor(factor) for name, factor in factors.items()}
        nvfp4_cast([mode.from_tensor(x)], {1: [mode.from_tensor(scale)]}, **fakes)
    for future in launch._compiling.values():
        future.result()
    count = len(kernels)
    nvfp4_cast([x], {1: [scale]}, **factors)
    assert len(kernels) == count > 0


def test_integer_arithmetic_agrees_with_tritons():
    for n in (*range(1, 70), 2**31 - 1, 2**31, 2**31 + 1):
        assert device.next_power_of_2(n) == triton.next_power_of_2(n)
        for divisor in (1, 3, 64):
            assert device.cdiv(n, divisor) == triton.cdiv(n, divisor)
            assert device.round_up(n, divisor) == triton.cdiv(n, divisor) * divisor
    assert device.cdiv(0, 3) == device.round_up(0, 3) == 0


def test_which_gpus_overlap_launches(monkeypatch):
    monkeypatch.setattr(device, "INTERPRETED", False)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:0")
    for capability, overlap in {(8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True}.items():
        monkeypatch.setattr(device, "_capability", lambda index, capability=capability: capability)
        assert device.overlaps_launches(x) == overlap
    assert not device.overlaps_launches(torch.empty(1))


def test_which_gpus_round_to_fp8_and_fp4(monkeypatch):
    monkeypatch.setattr(device, "INTERPRETED", False)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:0")
    expected = {(8, 6): (False, False), (8, 9): (True, False), (9, 0): (True, False), (10, 0): (True, True)}
    for capability, conversions in expected.items():
        monkeypatch.setattr(device, "_capability", lambda index, capability=capability: capability)
        assert (device.converts_fp8(x), device.converts_fp4(x)) == conversions
    assert not device.converts_fp8(torch.empty(1)) and not device.converts_fp4(torch.empty(1))
