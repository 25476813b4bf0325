import io
import sys

import pytest

from mxtrain.cli.closed_streams import open_closed_streams


@pytest.mark.parametrize("errors, written", [("strict", b"?"), ("backslashreplace", b"\\xb1")])
def test_characters_that_a_stream_lacks_stop_no_command(monkeypatch, errors, written):
    file = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(file, encoding="ascii", errors=errors))
    open_closed_streams()
    print("\u00b1", end="", flush=True)
    assert file.getvalue() == written


def test_a_closed_stream_takes_everything(monkeypatch):
    monkeypatch.setattr(sys, "stderr", None)
    open_closed_streams()
    print("gone", file=sys.stderr, flush=True)
