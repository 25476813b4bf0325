"""Launches, integer arithmetic, and device facts."""

import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

from mxtrain.launch import launch
from mxtrain.launch.launch import Launch


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


def test_integer_arithmetic_agrees_with_tritons():
    for n in (*range(1, 70), 2**31 - 1, 2**31, 2**31 + 1):
        assert launch.next_power_of_2(n) == triton.next_power_of_2(n)
        for divisor in (1, 3, 64):
            assert launch.cdiv(n, divisor) == triton.cdiv(n, divisor)
            assert launch.round_up(n, divisor) == triton.cdiv(n, divisor) * divisor
    assert launch.cdiv(0, 3) == launch.round_up(0, 3) == 0


def test_which_gpus_overlap_launches(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:0")
    for capability, overlap in {(8, 0): False, (8, 9): False, (9, 0): True, (10, 0): True}.items():
        monkeypatch.setattr(launch, "_capability", lambda index, capability=capability: capability)
        assert launch.overlaps_launches(x) == overlap
    assert not launch.overlaps_launches(torch.empty(1))


def test_which_gpus_round_to_fp8_and_fp4(monkeypatch):
    monkeypatch.setattr(launch, "INTERPRETED", False)
    with FakeTensorMode():
        x = torch.empty(1, device="cuda:0")
    expected = {(8, 6): (False, False), (8, 9): (True, False), (9, 0): (True, False), (10, 0): (True, True)}
    for capability, conversions in expected.items():
        monkeypatch.setattr(launch, "_capability", lambda index, capability=capability: capability)
        assert (launch.converts_fp8(x), launch.converts_fp4(x)) == conversions
    assert not launch.converts_fp8(torch.empty(1)) and not launch.converts_fp4(torch.empty(1))
