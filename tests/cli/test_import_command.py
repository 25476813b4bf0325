from pathlib import Path

import pytest

from mxtrain import cli


def test_the_arguments_reach_the_import(monkeypatch, capsys):
    from mxtrain.titan.hugging_face import import_model

    calls = []
    monkeypatch.setattr(import_model, "import_model", lambda *args: calls.append(args) or "report")
    assert cli.main(["import", "a", "b"]) == 0
    assert cli.main(["import", "a", "b", "--config", "c.toml"]) == 0
    assert calls == [(Path("a"), Path("b"), None), (Path("a"), Path("b"), Path("c.toml"))]
    assert capsys.readouterr().out == "report\nreport\n"


@pytest.mark.parametrize("model", ["nowhere", "."])
def test_a_folder_without_a_model_is_one_line(model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["import", model, "run"]) == 2
    error = f"MODEL_DIR = {str(Path(model))!r}: config.json is missing; give the folder of a Hugging Face model"
    assert capsys.readouterr().err == f"mxtrain: error: {error}\n"
    assert list(tmp_path.iterdir()) == []
