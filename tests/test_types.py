"""What mypy and pyright see of mxtrain, in an editable installation and in a wheel."""

import json
import os
import shutil
import subprocess
import sys
import venv
from functools import cache
from pathlib import Path

import pytest

from tests.support.packages import copy_source, pip

USER = Path(__file__).parent / "support" / "typed_user.py"
PYRIGHT_CONFIG = {
    "typeCheckingMode": "strict",
    "reportUnnecessaryTypeIgnoreComment": True,
    "reportUnknownVariableType": False,  # with_mxtrain has a type of TorchTitan 0.3, which may not be installed
}
COMMANDS = {"pyright": ["pyright", "--pythonpath"], "mypy": ["mypy", "--strict", "--python-executable"]}
# mypy reads PyTorch for ten seconds.
CASES = [("editable", "pyright"), pytest.param("wheel", "mypy", marks=pytest.mark.sweep)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("types")


@pytest.fixture(scope="module")
def python_with(folder):
    """``python_with(installation)``: Python in an environment with this one's packages, and mxtrain by itself."""
    source = copy_source(folder / "source")

    @cache
    def python_with(installation):
        environment = folder / installation
        venv.create(environment)
        (packages,) = environment.glob("lib/python*/site-packages")
        (packages / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("-packages")))
        editable = ["-e"] if installation == "editable" else []
        pip("install", "--no-deps", "--no-build-isolation", "--no-index", "--target", packages, *editable, source)
        return environment / "bin" / "python"

    return python_with


@pytest.mark.parametrize(("installation", "checker"), CASES)
def test_checkers_know_the_types_of_all_public_names(installation, checker, python_with, folder, tmp_path):
    shutil.copy(USER, tmp_path)
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(PYRIGHT_CONFIG))
    # Without PYTHONPATH, which may name the checkout.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"MYPY_CACHE_DIR": str(folder / "mypy"), "PYRIGHT_PYTHON_IGNORE_WARNINGS": "1"}
    command = [sys.executable, "-m", *COMMANDS[checker], python_with(installation), USER.name]
    result = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
