"""Shared fixtures. The suite needs no GPU; where there is one, tests that use ``device`` run on it as well."""

import os
import resource
from contextlib import contextmanager

import pytest
import torch

from tests.support.interpreter import interpret_faster

if not torch.cuda.is_available():
    # Before any kernel is imported: without a GPU Triton interprets them, so that emulation on the CPU runs on them.
    os.environ.setdefault("TRITON_INTERPRET", "1")
    interpret_faster()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the trainings that tests share. A pytest worker that needs one which another does can only wait."""
    items.sort(key=lambda item: "base" not in item.fixturenames)


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
