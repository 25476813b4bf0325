from tests.titan.conftest import base  # noqa: F401 - a fixture
