"""What can be checked of the Dockerfile without Docker: files, extras, Python, and the command that it starts."""

import re
import shutil
from pathlib import Path

import tomli

from tests.support.packages import copy_source

ROOT = Path(__file__).parents[2]
FILE = ROOT / "scripts" / "docker" / "Dockerfile"
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[str]:
    """The arguments of each instruction of a name."""
    text = re.sub(r"^#.*\n", "", FILE.read_text(), flags=re.MULTILINE).replace("\\\n", " ")
    return re.findall(rf"^{name} +(.*)", text, flags=re.MULTILINE)


def copied() -> list[tuple[str, str]]:
    """(file or folder of the checkout, place in the image)"""
    pairs = [(source, words[-1]) for words in map(str.split, instructions("COPY")) for source in words[:-1]]
    return [(source, target + source if target.endswith("/") else target) for source, target in pairs]


def test_the_image_has_what_a_package_is_built_from(tmp_path):
    for source, target in copied():
        copy = tmp_path / target.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / source).is_dir():
            shutil.copytree(ROOT / source, copy, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / source, copy)
    (tmp_path / "expected").mkdir()
    expected = copy_source(tmp_path / "expected")
    files = [{path.relative_to(top) for path in top.rglob("*")} for top in (tmp_path / "source", expected)]
    assert files[0] == files[1]
    first, *kept = re.findall(r"^[^#\n].*", FILE.with_suffix(".dockerignore").read_text(), flags=re.MULTILINE)
    assert first == "*" and {line[1:] for line in kept if line.startswith("!")} == {source for source, _ in copied()}


def test_pip_installs_extras_that_exist():
    (extras,) = [match[1] for run in instructions("RUN") for match in re.finditer(r"/source\[(.*)\]", run)]
    (default,) = instructions("ARG")
    choices = [default.removeprefix("TITAN="), *re.findall(r"^# (titan\w+) takes", FILE.read_text(), re.MULTILINE)]
    assert sorted(choices) == sorted(name for name in PROJECT["optional-dependencies"] if name.startswith("titan"))
    assert extras.split(",")[0] == "$TITAN" and set(extras.split(",")[1:]) <= set(PROJECT["optional-dependencies"])


def test_its_commands_are_those_of_the_readme():
    commands = re.findall(r"^#   (docker .*)", FILE.read_text(), flags=re.MULTILINE)
    assert len(commands) == 2
    assert all(f"\n{command}\n" in (ROOT / "README.md").read_text() for command in commands)
