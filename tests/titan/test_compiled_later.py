import subprocess
import sys

import pytest
import torch

from mxtrain.titan import compiled_later
from mxtrain.titan.compiled_later import CompiledLater, attention_compiled_later

NOT_NEEDED = ("torch._inductor.compile_fx", "wandb", "matplotlib", "transformers")


def test_a_worker_starts_without_what_its_run_may_never_use():
    code = f"import sys, mxtrain.titan.train; print([name for name in {NOT_NEEDED} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout) == (0, "[]\n"), result.stderr


def double(x, factor=2.0):
    return x * factor


@pytest.fixture
def later():
    torch.compiler.reset()
    return CompiledLater(double, backend="eager", fullgraph=True)


def test_it_compiles_once_at_the_first_call(later, monkeypatch):
    calls = []
    compile_now = torch.compile
    monkeypatch.setattr(torch, "compile", lambda *a, **options: calls.append(options) or compile_now(*a, **options))
    x = torch.randn(3)
    for _ in range(2):
        assert torch.equal(later(x, factor=3.0), 3 * x)
    assert calls == [{"backend": "eager", "fullgraph": True}]


def test_a_compiled_layer_contains_the_function_without_a_graph_break(later):
    layer = torch.compile(lambda x: later(x) + 1, backend="eager", fullgraph=True)
    x = torch.randn(3)
    assert torch.equal(layer(x), 2 * x + 1)


def test_only_the_module_of_attention_compiles_later(monkeypatch):
    compile_now = torch.compile
    with attention_compiled_later():
        assert not isinstance(torch.compile(double, backend="eager"), CompiledLater)
        monkeypatch.setattr(compiled_later, "ATTENTION", __name__)
        assert isinstance(torch.compile(double, backend="eager"), CompiledLater)
    assert torch.compile is compile_now
