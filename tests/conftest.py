"""Shared fixtures. The suite needs no GPU; where there is one, tests that use ``device`` run on it as well."""

import os
import resource
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch


def interpret_faster() -> None:
    """Spare Triton's interpreter work that changes nothing: more than half of its time."""
    from triton.language import block_type
    from triton.runtime import interpreter

    patch, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    patched = set()

    def patch_once(function):
        # Functions of a kernel patch the language anew in every call, although those of a module see the same one.
        if id(function.__globals__) not in patched:
            patched.add(id(function.__globals__))
            return patch(function)

    def launch_anew(self, *args, **kwargs):
        patched.clear()
        return launch(self, *args, **kwargs)

    interpreter._patch_lang, interpreter.GridExecutor.__call__ = patch_once, launch_anew
    # Every sum and product of integers is computed again in 64 bits, for an assertion that only debugging makes.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    # Every call builds the table of all dtypes.
    np_dtype_of, np_dtypes = interpreter._get_np_dtype, {}

    def np_dtype(dtype):
        name = dtype.scalar.name
        if name not in np_dtypes:
            np_dtypes[name] = np_dtype_of(dtype)
        return np_dtypes[name]

    interpreter._get_np_dtype = np_dtype
    # The interpreter's types are those of the language.
    to_ir = block_type.to_ir
    block_type.to_ir = lambda self, of: self if of is builder else to_ir(self, of)


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
