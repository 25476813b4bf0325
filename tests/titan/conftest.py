import os

import pytest

from tests.support import training_runs


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
