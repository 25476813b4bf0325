import pytest

from mxtrain.formats.hardware import runs_kernels


@pytest.fixture
def kernels(device):
    """Skip a test where norms and casts are not single operations of a graph."""
    if not runs_kernels("emulated", device):
        pytest.skip("no kernels on this device: TRITON_INTERPRET is off")
