"""The workflow of GitHub Actions runs what anyone can run, .ci/run, which tests what a plain installation takes."""

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
