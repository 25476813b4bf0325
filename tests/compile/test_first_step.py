"""PyTorch knows what kernels in graphs write, and only the kinds of their numbers."""

from types import SimpleNamespace

import pytest
import torch
from torch._higher_order_ops import triton_kernel_wrap
from torch._inductor.codegen.wrapper import PythonWrapperCodegen

from mxtrain.compile import first_step, passes


class Kernel:
    arg_names = ["x_ptr", "y_ptr", "total_ptr", "rows", "BLOCK"]
    params = [SimpleNamespace(name=name, is_constexpr=name == "BLOCK") for name in arg_names]


LAUNCH = {"x_ptr": torch.ones(2), "y_ptr": torch.ones(2), "total_ptr": None, "rows": 48, "BLOCK": 48}


@pytest.fixture
def kernel(monkeypatch):
    """A kernel that graphs launch with the result ``y_ptr`` or ``total_ptr``."""
    kernel = Kernel()
    monkeypatch.setitem(first_step.results_of, kernel, {"y_ptr", "total_ptr"})
    monkeypatch.setitem(first_step.inputs_of, kernel, {"x_ptr"})
    monkeypatch.setattr(first_step, "_ANALYZE", lambda *_: "analyzed")
    monkeypatch.setattr(first_step, "_DEFINE", lambda wrapper, kernel, configs, kwargs, *others: (kwargs, *others))
    passes.install()
    yield kernel
    passes.remove()
    assert getattr(triton_kernel_wrap, first_step._NAME) is first_step._ANALYZE
    assert PythonWrapperCodegen.define_user_defined_triton_kernel is first_step._DEFINE


def written(kernel: Kernel, launch: dict):
    found = getattr(triton_kernel_wrap, first_step._NAME)(kernel, launch, {})
    return [each.name for each in found.read_writes.writes] if hasattr(found, "read_writes") else found


def define(kernel: Kernel, launch: dict):
    return PythonWrapperCodegen.define_user_defined_triton_kernel(None, kernel, [], launch, "others")


def test_results_are_written(kernel):
    assert written(kernel, LAUNCH) == ["y_ptr"]
    assert written(kernel, LAUNCH | {"total_ptr": torch.ones(2)}) == ["y_ptr", "total_ptr"]


def test_numbers_of_a_kind_are_one(kernel):
    for rows, number in ((48, 16), (0, 16), (-16, 16), (7, 2), (1, 1), (2**31 + 16, 2**31 + 16), (-(2**40), -(2**40))):
        defined, others = define(kernel, LAUNCH | {"rows": rows})
        assert defined == LAUNCH | {"rows": number} and others == "others"
    for rows in (True, 0.5, None):
        assert define(kernel, LAUNCH | {"rows": rows})[0]["rows"] is rows


def test_pytorch_analyzes_other_kernels(kernel):
    other = Kernel()
    assert written(other, LAUNCH) == "analyzed"
    assert define(other, LAUNCH)[0] == LAUNCH


def test_pytorch_analyzes_where_it_is_open_what_an_argument_holds(kernel, monkeypatch):
    monkeypatch.setitem(first_step.inputs_of, kernel, {"x_ptr", "y_ptr"})
    assert written(kernel, LAUNCH) == "analyzed"
    monkeypatch.setitem(first_step.inputs_of, kernel, set())  # no launch had an x_ptr
    assert written(kernel, LAUNCH) == "analyzed"
