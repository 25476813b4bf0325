import io
import logging
import runpy
import sys
import warnings
from types import SimpleNamespace

import pytest

from mxtrain.cli import quiet


def test_verbose_is_a_flag_or_a_variable(monkeypatch):
    for words, variable, verbose in (("--a b", "", False), ("--verbose --a b", "", True), ("--a b", "1", True),
                                     ("--a b", "0", False)):  # fmt: skip
        monkeypatch.setenv("MXTRAIN_VERBOSE", variable)
        assert quiet.take_verbose(words.split()) == (verbose, ["--a", "b"])


def test_only_warnings_that_a_user_cannot_act_on_are_hidden(caplog):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        quiet.hide_library_warnings()
        for text in ("'set_vital' is deprecated, please", "In CPU autocast, but the target dtype is not supported. D"):
            warnings.warn(text, stacklevel=1)
        warnings.warn("`torch.jit.script_method` is deprecated. Please", DeprecationWarning, stacklevel=1)
        warnings.warn("lr_scheduler.step() before optimizer.step()", stacklevel=1)
    assert [str(warning.message) for warning in caught] == ["lr_scheduler.step() before optimizer.step()"]
    for name, text in (
        ("torchao", "Failed to load /x/_C_mxfp8.so: Could not load this library"),
        ("torchao", "Skipping import of cpp extensions due to incompatible torch version"),
        ("torch.utils._pytree", "<enum 'KernelPreference'> is an Enum subclass and is now natively supported"),
        ("torchao", "this kernel is slow"),
    ):
        logging.getLogger(name).warning(text)
        logging.getLogger(name).filters.clear() if text == "this kernel is slow" else None
    logging.getLogger("torch.utils._pytree").filters.clear()
    assert "this kernel is slow" in caplog.text and "Failed" not in caplog.text and "Enum" not in caplog.text


@pytest.mark.parametrize("verbose", [False, True])
def test_a_worker_hides_warnings_before_it_imports_torchtitan(monkeypatch, verbose):
    calls = []
    monkeypatch.delenv("MXTRAIN_VERBOSE", raising=False)
    monkeypatch.setattr(quiet, "hide_library_warnings", lambda: calls.append("hide"))
    monkeypatch.setitem(sys.modules, "mxtrain.titan", SimpleNamespace())
    stand_in = SimpleNamespace(work=lambda *arguments: calls.append(arguments))
    monkeypatch.setitem(sys.modules, "mxtrain.titan.train", stand_in)
    monkeypatch.setattr(sys, "argv", ["train", *(["--verbose"] if verbose else []), "--training.steps=3"])
    with pytest.raises(SystemExit):
        runpy.run_module("mxtrain.train", run_name="__main__")
    assert calls == ([] if verbose else ["hide"]) + [(["--training.steps=3"], verbose)]


@pytest.mark.parametrize("errors, written", [("strict", b"?"), ("backslashreplace", b"\\xb1")])
def test_characters_that_a_stream_lacks_stop_no_command(monkeypatch, errors, written):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii", errors=errors))
    quiet.open_closed_streams()
    print("\u00b1", end="", flush=True)
    assert file.getvalue() == written


def test_a_closed_stream_takes_everything(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    quiet.open_closed_streams()
    print("gone", file=sys.stderr, flush=True)
