"""Shared fixtures. The suite needs no GPU; where there is one, tests that use ``device`` run on it as well."""

import os
import resource
from contextlib import contextmanager

import pytest
import torch


def patch_the_language_once_per_launch() -> None:
    """Have Triton's interpreter replace the functions of ``triton.language`` once per launch.

    It does so for every call of a function within a kernel, although nothing is left to replace: a third of the time.
    """
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(function):
        # The functions of a module see the same language.
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            return patch(function)

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew


if not torch.cuda.is_available():
    # Before any kernel is imported: without a GPU Triton interprets them, so that emulation on the CPU runs on them.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    patch_the_language_once_per_launch()

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.fixture(params=DEVICES)
def device(request):
    """Default device of a test: whatever it creates without naming a device is created there."""
    torch.set_default_device(request.param)
    yield request.param
    torch.set_default_device(None)


@pytest.fixture(autouse=True)
def no_rounding_step():
    """Clear the rounding step after every test."""
    yield
    from mxtrain import set_rounding_step

    set_rounding_step(None)


@pytest.fixture
def compile_backend(device, monkeypatch):
    """Inductor with our passes on a GPU; on a CPU, where it serves no training, the same graphs without its code."""
    from mxtrain.compile import launches, passes
    from tests.support.graph_checks import graphs_after_all_passes

    torch._dynamo.reset()
    monkeypatch.setattr(launches, "DEVICES", DEVICES)
    passes.install()
    yield "inductor" if device == "cuda" else graphs_after_all_passes()
    passes.remove()


@pytest.fixture
def full_disk():
    """``with full_disk(size)``: no file grows beyond ``size`` bytes, and writes fail in the middle of a row."""

    @contextmanager
    def full_disk(size):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return full_disk
