"""The workflow of GitHub Actions runs what anyone can run, .ci/run, which tests what a plain installation takes."""

import os
import subprocess
from pathlib import Path

import tomli
import yaml
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_the_workflow_runs_ci_run_on_the_oldest_python_and_a_newer_one():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} == set(workflow[True])  # YAML 1.1 reads the key "on" as true
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    oldest, *newer = job["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={oldest}" and newer
    assert all(f"Programming Language :: Python :: {python}" in PROJECT["classifiers"] for python in (oldest, *newer))


def test_a_plain_installation_takes_the_pair_of_titan03_which_ci_tests():
    """pip takes the newest TorchTitan and the newest PyTorch that are allowed, on every Python that is."""
    allowed = {each.name: each for each in map(Requirement, PROJECT["dependencies"])}
    for tested in map(Requirement, PROJECT["optional-dependencies"]["titan03"]):
        limits = [
            {part.version for part in each.specifier if part.operator in ("<", "<=", "==")}
            for each in (allowed[tested.name], tested)
        ]
        assert allowed[tested.name].marker is None and limits[0] == limits[1]
    run = (ROOT / ".ci" / "run").read_text()
    assert "MXTRAIN_TITAN=0.3" in run and ".ci/matrix newest\n" in run


def test_the_matrix_tests_with_environments_that_exist_as_they_are(tmp_path):
    """An environment is a folder with bin/python. One that fails does not keep the next from its tests."""
    for name, tests in (
        ("good", "echo 7 passed; pwd -P; echo $PYTHONPATH; echo $* passed"),
        ("bad", "echo 1 failed; exit 1"),
    ):
        (tmp_path / name / "bin").mkdir(parents=True)
        python = tmp_path / name / "bin" / "python"
        python.write_text(f"#!/bin/sh\nif [ $1 = -c ]; then printf '2.{name}\\t3.8\\t0.18\\n'; else {tests}; fi\n")
        python.chmod(0o755)
    result = subprocess.run(
        [ROOT / ".ci" / "matrix", "./none", "./bad", "./good"],
        cwd=tmp_path,
        env={"PATH": os.environ["PATH"], "TESTS": "tests/nn"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    rows = [line.split() for line in result.stdout.splitlines()[1:]]
    assert result.returncode == 1 and not (tmp_path / "none").exists()
    assert rows[0][:1] == ["./none"] and rows[0][-2:] == ["installation", "failed"]
    assert rows[1] == ["2.bad", "3.8", "0.18", "1", "failed"]
    assert rows[2] == ["2.good", "3.8", "0.18", *"-m pytest -n auto -q tests/nn passed".split()]
    log = (tmp_path / "good" / "tests.log").read_text().splitlines()
    assert log[1:3] == [str(ROOT), str(ROOT)]
