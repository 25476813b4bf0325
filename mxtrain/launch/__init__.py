"""How kernels are launched and registered as PyTorch's operations, and where they run."""

import os
from importlib.util import find_spec

# Triton is installed on Linux only.
HAS_TRITON = find_spec("triton") is not None
# Triton's own reading of the variable. Importing Triton for it would take longer than the rest of this package.
_INTERPRETS_TRITON = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "y", "on")


def runs_kernels(mode: str, device_type: str) -> bool:
    """Return whether ``mode`` runs Triton kernels on this device type; plain PyTorch gives the same bits.

    Kernels run on CUDA devices, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1: very slow, for tests).
    """
    has_kernels = device_type == "cuda" or (device_type == "cpu" and _INTERPRETS_TRITON)
    return HAS_TRITON and mode != "reference" and has_kernels
