"""The tests of kernels run on a GPU, or on the CPU where Triton interprets them."""

from tests.kernels.conftest import device, huge  # noqa: F401
