"""Fault: TorchTitan does not train on a machine without an accelerator. No release mends it.

``torchtitan.tools.utils`` falls back to the device type "cuda", and other modules of TorchTitan import the device type
and module by name. ``use_cpu`` replaces them with "cpu" and a stand-in for ``torch.cuda``.
"""

import ctypes
import math
import os
import platform
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import torchtitan.tools.utils as titan_utils

# From glibc's malloc.h
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3


def use_cpu() -> None:
    """Make TorchTitan use the CPU, also in those of its modules that have already imported the device by name."""
    titan_utils.device_type, titan_utils.device_module = "cpu", CpuDevice
    # Unknown. TorchTitan would take the peak of an A100, and report a meaningless MFU.
    titan_utils.get_peak_flops = lambda device_name: math.nan
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"
            if hasattr(module, "device_module"):
                module.device_module = CpuDevice
    keep_freed_memory()


def keep_freed_memory() -> None:
    """Let the C library keep the memory of freed tensors up to 32 MiB, its limit, for later tensors.

    glibc gives much of it back to the kernel, which clears every page again for the next tensor. Steps of a small model
    with MX casts on a CPU take 10 to 15 % less time without that.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # other C libraries may lack it
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 * 2**20)
        mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


class CpuDevice:
    """The functions of ``torch.cuda`` that TorchTitan calls. Memory is the process's resident set."""

    @staticmethod
    def set_device(device) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def synchronize(device=None) -> None:
        pass

    @staticmethod
    def empty_cache() -> None:
        pass

    @staticmethod
    def get_device_name(device=None) -> str:
        return f"CPU ({platform.machine()}, {os.cpu_count()} cores)"

    @staticmethod
    def get_device_properties(device=None) -> SimpleNamespace:
        return SimpleNamespace(total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))

    @staticmethod
    def memory_stats(device=None) -> dict[str, int]:
        """Peak resident set in bytes, under the names of the CUDA allocator's statistics."""
        peak = _peak_resident_bytes()
        return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}

    @staticmethod
    def reset_peak_memory_stats(device=None) -> None:
        """Do nothing: ``memory_stats`` reports the peak since the process started."""


def _peak_resident_bytes() -> int:
    """Return this process's peak resident set. On Linux ``ru_maxrss`` would include the parent process's peak."""
    status = Path("/proc/self/status")
    if not status.exists():  # macOS, where ru_maxrss is in bytes
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\s*(\d+)", status.read_text())[1]) * 1024
