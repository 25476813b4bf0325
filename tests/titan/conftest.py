import json
import os

import datasets as hf_datasets
import pytest

from tests.support import training_runs
from tests.support.data_checks import text


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """One folder for all the pytest workers of a test session."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base


@pytest.fixture(scope="session")
def one(base):
    """Outcomes of the runs of one process, by name."""
    return training_runs.one_process(base)


@pytest.fixture(scope="session")
def several(base):
    """Outcomes of the runs of two and of four processes, by name."""
    return training_runs.several_processes(base)


@pytest.fixture(scope="session")
def command_run(base):
    """The outcome of ``mxtrain train``."""
    return training_runs.command_run(base)


@pytest.fixture
def own_folder(tmp_path, monkeypatch):
    """A folder of the test's own for ./outputs and all caches."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MXTRAIN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(hf_datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text(i)}) + "\n" for i in range(40)))
    return path
