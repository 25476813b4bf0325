"""The script finds the names that a copy of TorchTitan does not have."""

import pytest

from mxtrain.settings.releases import package_folder
from mxtrain.titan.releases import RELEASE
from scripts import titan_imports


def test_the_installed_release_has_all_names(capsys):
    assert titan_imports.main([str(package_folder()), "--release", RELEASE]) == 0
    assert capsys.readouterr().out == ""


OURS = """
import torch
import torchtitan.old as old
from torchtitan.tools import utils
from torchtitan.new import Kept, Gone
utils.kept, utils.Gone.attribute, Gone.attribute, torch.gone
with patch("torchtitan.new.Patched"):
    pass
"""
THEIRS = {"train": "", "tools/__init__": "", "tools/utils": "kept = 1", "new": "from x import y as Kept"}


def test_names_that_are_gone_are_printed_with_their_files(tmp_path, monkeypatch, capsys):
    for name, text in {**{f"torchtitan/{name}": text for name, text in THEIRS.items()}, "ours/v03/a": OURS}.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.setattr(titan_imports, "PACKAGE", tmp_path / "ours")
    assert titan_imports.main([str(tmp_path)]) == 1
    gone = ["torchtitan.new.Gone", "torchtitan.new.Patched", "torchtitan.old", "torchtitan.tools.utils.Gone"]
    assert capsys.readouterr().out.splitlines() == [f"{name}: ours/v03/a.py" for name in gone]
    assert titan_imports.main([str(tmp_path), "--release", "v02"]) == 0, "reads no other release's folder"


def test_a_folder_without_torchtitan_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        titan_imports.main([str(tmp_path)])
    assert "has no package torchtitan" in capsys.readouterr().err
