"""PyTorch analyzes a kernel of ours once for launches that differ in numbers only."""

from types import SimpleNamespace

import torch
from torch._higher_order_ops import triton_kernel_wrap

from mxtrain.compile import launches as analyses
from mxtrain.compile import passes


class Kernel:
    params = [SimpleNamespace(name=name, is_constexpr=name == "FORM") for name in ("x_ptr", "rows", "FORM")]

    def __init__(self, module: str):
        self.__module__ = module


def test_numbers_make_no_difference(monkeypatch):
    asked = []
    monkeypatch.setattr(analyses, "_PYTORCHS", lambda kernel, kwargs, _: asked.append(kwargs) or len(asked))
    passes.install()
    try:
        find = getattr(triton_kernel_wrap, analyses._NAME)
    finally:
        passes.remove()
    launch = {"x_ptr": torch.ones(2), "rows": 3, "FORM": "image"}
    kernel, others = Kernel("mxtrain.formats.cast"), Kernel("users.kernels")
    assert [find(kernel, {**launch, "rows": rows}, {}) for rows in (3, 16)] == [1, 1]
    assert find(kernel, {**launch, "FORM": "codes"}, {}) == 2
    assert find(kernel, {**launch, "x_ptr": torch.ones(2, dtype=torch.int8)}, {}) == 3
    assert find(kernel, {**launch, "x_ptr": None}, {}) == 4
    assert find(Kernel("mxtrain.formats.cast"), launch, {}) == 5
    assert [find(others, launch, {}) for _ in range(2)] == [6, 7]
