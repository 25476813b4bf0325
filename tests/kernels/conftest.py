import pytest
import torch

from mxtrain.ops.hardware import HAS_TRITON

if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    """Make the GPU the default device of a test, or the CPU where Triton interprets kernels."""
    from mxtrain.kernels.device import INTERPRETED

    name = "cpu" if INTERPRETED else "cuda"
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("TRITON_INTERPRET is off and there is no GPU")
    torch.set_default_device(name)
    yield name
    torch.set_default_device(None)
