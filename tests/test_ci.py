"""The workflow of GitHub Actions runs what anyone can run: .ci/run."""

from pathlib import Path

import tomli
import yaml

ROOT = Path(__file__).parents[1]


def test_the_workflow_runs_ci_run_on_the_oldest_python_and_a_newer_one():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    assert {"push", "pull_request"} == set(workflow[True])  # YAML 1.1 reads the key "on" as true
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    project = tomli.loads((ROOT / "pyproject.toml").read_text())["project"]
    oldest, *newer = job["strategy"]["matrix"]["python"]
    assert project["requires-python"] == f">={oldest}" and newer
    assert all(f"Programming Language :: Python :: {python}" in project["classifiers"] for python in (oldest, *newer))
