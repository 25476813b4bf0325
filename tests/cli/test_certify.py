"""``mxtrain certify`` writes and replays a certificate; its exit status says whether the machine agrees."""

import json

import pytest

from mxtrain import cli
from mxtrain.cli import certify
from mxtrain.diagnostics import certificate


@pytest.fixture
def written(tmp_path, monkeypatch):
    monkeypatch.setattr(certify, "CASES", [dict(recipe="mxfp8", shape=(64, 96, 64))])
    path = tmp_path / "own.json"
    assert cli.main(["certify", "--write", str(path)]) == 0
    return path


def test_a_certificate_that_was_written_here_holds_here(written, capsys):
    assert cli.main(["certify", str(written)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  fprop X      equal: reference (cpu), torchao casts (cpu)") for line in lines)
    assert any(line.startswith("  wgrad dW     within the bound: reference (cpu)") for line in lines)
    assert lines[-1].startswith("1 cases on reference (cpu), ") and lines[-1].endswith(": no differences")
    assert any(line.startswith("  torch ") for line in lines)


def test_a_difference_is_status_1(written, capsys):
    cases = certificate.read(written)
    cases[0]["operands"]["wgrad dY"]["codes"] = "0" * 32
    certificate.write(written, cases)
    assert cli.main(["certify", str(written)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("  wgrad dY     reference (cpu): codes [64, 64] have the hash ") for line in lines)
    assert not lines[-1].endswith("no differences")


def test_mistakes_are_one_line(written, tmp_path, capsys):
    content = json.loads(written.read_text())
    content["cases"][0]["signs"] += 1
    written.write_text(json.dumps(content))
    for words, message in (
        ([str(written)], f"{written} is damaged"),
        ([str(tmp_path / "none.json")], f"{tmp_path / 'none.json'} does not exist"),
        ([str(written), "--write", "x.json"], "--write x.json takes the place of FILE"),
        (["--write", str(tmp_path / "none" / "x.json")], f"{tmp_path / 'none' / 'x.json'} cannot be written: "),
    ):
        capsys.readouterr()
        assert cli.main(["certify", *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith(f"mxtrain: error: {message}")
