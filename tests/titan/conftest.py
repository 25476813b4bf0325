import os

import pytest


@pytest.fixture(scope="session", autouse=True)
def shared_text_cache(tmp_path_factory):
    """One text cache for all the runs of a test session, also those of parallel pytest workers."""
    base = tmp_path_factory.getbasetemp()
    if os.environ.get("PYTEST_XDIST_WORKER"):
        base = base.parent
    os.environ["MXTRAIN_TEST_CACHE"] = str(base / "mxtrain-cache")
