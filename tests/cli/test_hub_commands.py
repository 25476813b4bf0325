"""``mxtrain export`` and ``import`` from the command line."""

from pathlib import Path

import pytest
import torch

from mxtrain import cli


@pytest.fixture
def exports(monkeypatch):
    """The arguments that the export gets."""
    from mxtrain.titan.hugging_face import export

    calls = []
    monkeypatch.setattr(export, "export", lambda *args, **options: calls.append((args, options)) or (3, "lines"))
    return calls


def test_the_options_reach_the_export(exports, capsys):
    assert cli.main(["export", "a", "b"]) == 0
    assert cli.main(["export", "a", "b", "--step", "7", "--fold-gain", "--dtype", "bfloat16"]) == 0
    plain = {"format": "hf", "step": None, "fold_gain": False, "dtype": None}
    paths = (Path("a"), Path("b"))
    assert exports == [(paths, plain), (paths, plain | {"step": 7, "fold_gain": True, "dtype": torch.bfloat16})]
    assert capsys.readouterr().out == "lines\nlines\n"


def test_the_arguments_reach_the_import(monkeypatch, capsys):
    from mxtrain.titan.hugging_face import import_model

    calls = []
    monkeypatch.setattr(import_model, "import_model", lambda *args: calls.append(args) or "lines")
    assert cli.main(["import", "a", "b"]) == 0
    assert cli.main(["import", "a", "b", "--config", "c.toml"]) == 0
    assert calls == [(Path("a"), Path("b"), None), (Path("a"), Path("b"), Path("c.toml"))]
    assert capsys.readouterr().out == "lines\nlines\n"


@pytest.mark.parametrize("model", ["nowhere", "."])
def test_a_folder_without_a_model_is_one_line(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", model, "run"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"mxtrain: error: MODEL_DIR = {str(Path(model))!r}: config.json is missing")
    assert error.count("\n") == 1 and list(tmp_path.iterdir()) == []
