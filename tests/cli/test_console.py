import logging
import runpy
import sys
import warnings
from types import SimpleNamespace

import pytest

from mxtrain.cli import console


def test_verbose_is_a_flag_or_a_variable(monkeypatch):
    for words, variable, verbose in (("--a b", "", False), ("--verbose --a b", "", True), ("--a b", "1", True),
                                     ("--a b", "0", False)):  # fmt: skip
        monkeypatch.setenv("MXTRAIN_VERBOSE", variable)
        assert console.take_verbose(words.split()) == (verbose, ["--a", "b"])


def test_warnings_of_libraries_are_hidden_but_for_those_of_cuda(monkeypatch):
    for name in console.LOGGERS:
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        console.hide_library_warnings()
        for module in ("torch.jit._script", "torchao.float8", "torch.cuda", "torch.cuda.memory", "users.model"):
            warnings.warn_explicit(module, UserWarning, "file.py", 1, module)
        warnings.warn_explicit("invalid escape sequence '\\s'", SyntaxWarning, "file.py", 1)
    assert [str(warning.message) for warning in caught] == ["torch.cuda", "torch.cuda.memory", "users.model"]
    assert not logging.getLogger("torchao").isEnabledFor(logging.WARNING)


@pytest.mark.parametrize("verbose", [False, True])
def test_a_worker_hides_warnings_before_it_imports_torchtitan(monkeypatch, verbose):
    calls = []
    monkeypatch.delenv("MXTRAIN_VERBOSE", raising=False)
    monkeypatch.setattr(console, "hide_library_warnings", lambda: calls.append("hide"))
    monkeypatch.setitem(sys.modules, "mxtrain.titan", SimpleNamespace())
    stand_in = SimpleNamespace(work=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "mxtrain.titan.train", stand_in)
    monkeypatch.setattr(sys, "argv", ["train", *(["--verbose"] if verbose else []), "--training.steps=3"])
    with pytest.raises(SystemExit):
        runpy.run_module("mxtrain.train", run_name="__main__")
    assert calls == ([] if verbose else ["hide"]) + [(["--training.steps=3"], verbose)]


def test_a_closed_stream_takes_everything(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    console.open_closed_streams()
    print("gone", file=sys.stderr, flush=True)
