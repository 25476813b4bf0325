import random
import sys

import pytest
import tokenizers  # noqa: F401  (before python_machine hides the installed packages)

from mxtrain.data import python_source


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Every test uses a fresh cache folder, not the user's."""
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _prose(seed: int, words: int = 400) -> str:
    generator = random.Random(seed)
    letters = "abcdefghijklmnopqrstuvwxyz_"
    vocabulary = ["".join(generator.choices(letters, k=generator.randint(2, 9))) for _ in range(200)]
    lines = [" ".join(generator.choices(vocabulary, k=8)) for _ in range(words // 8)]
    return "\n".join(lines) + "\n"


@pytest.fixture(scope="session")
def prose():
    """``prose(seed, words=400)`` returns ASCII text that depends on the seed and compresses less than a table."""
    return _prose


@pytest.fixture
def python_machine(tmp_path, monkeypatch):
    """``python_machine({"json/decoder.py": text}, {"numpy/core.py": text})`` replaces this machine's Python files."""

    def build(standard: dict, installed: dict | None = None):
        library, packages = tmp_path / "lib", tmp_path / "lib" / "site-packages"
        for root, files in ((library, standard), (packages, installed or {})):
            for name, text in files.items():
                path = root / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(text if isinstance(text, bytes) else text.encode())
        monkeypatch.setattr(python_source.sysconfig, "get_paths", lambda: {"stdlib": str(library)})
        monkeypatch.setattr(sys, "path", [str(tmp_path), str(packages), str(packages)])
        return library

    return build
