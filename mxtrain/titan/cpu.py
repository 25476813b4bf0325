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
from contextlib import suppress
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


def _memory_stats(device=None) -> dict[str, int]:
    """Peak resident set in bytes since the process started, under the names of the CUDA allocator's statistics."""
    found = None
    with suppress(OSError):  # without /proc
        found = re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())  # gVisor lacks the line
    # ``ru_maxrss`` may include the parent process's peak.
    peak = int(found[1] if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}


CpuDevice = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    synchronize=lambda device=None: None,
    empty_cache=lambda: None,
    get_device_name=lambda device=None: f"CPU ({platform.machine()}, {os.cpu_count()} cores)",
    get_device_properties=lambda device=None: SimpleNamespace(
        total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    ),
    memory_stats=_memory_stats,
    reset_peak_memory_stats=lambda device=None: None,
)
"""The functions of ``torch.cuda`` that TorchTitan calls"""
