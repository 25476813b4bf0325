"""Let TorchTitan 0.2.2 train where there is no accelerator.

TorchTitan takes its device type and device module from ``torchtitan.tools.utils``, which falls back to "cuda", and
other modules import both by name. ``use_cpu`` puts "cpu" and a stand-in for ``torch.cuda`` in their place. For
mixtures of experts it lets ``torch.histc`` count integers, as on CUDA, and has expert parallelism order its tokens
without Triton.
"""

import functools
import os
import platform
import resource
import sys
from types import SimpleNamespace

import torch
import torchtitan.tools.utils as titan_utils

_histc = torch.histc


def use_cpu() -> None:
    """Point TorchTitan at the CPU: its utilities, and every module of it that already imported them by name."""
    titan_utils.device_type, titan_utils.device_module = "cpu", CpuDevice
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"
            if hasattr(module, "device_module"):
                module.device_module = CpuDevice
    torch.histc = histc
    # Not at the top: what it imports may look for the device.
    from torchtitan.models.moe import kernels, utils

    utils.generate_permute_indices = functools.partial(kernels.generate_permute_indices, use_cpu=True)


def histc(x: torch.Tensor, *args, **kwargs) -> torch.Tensor:
    """``torch.histc``, also of integers below 2^24 on a CPU; like that on CUDA it counts in the dtype of ``x``."""
    if x.is_floating_point() or x.is_cuda:
        return _histc(x, *args, **kwargs)
    return _histc(x.float(), *args, **kwargs).to(x.dtype)


class CpuDevice:
    """The part of the interface of ``torch.cuda`` that TorchTitan calls. Memory is the resident set of the process."""

    @staticmethod
    def set_device(device) -> None:
        pass

    @staticmethod
    def current_device() -> int:
        return 0

    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def is_available() -> bool:
        return True

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
        """The kernel's peak cannot be reset; what is reported is the peak since the process started."""

    current_stream = staticmethod(torch.cpu.current_stream)
    stream = staticmethod(torch.cpu.stream)
    Stream = torch.cpu.Stream


def _peak_resident_bytes() -> int:
    """Peak resident set of this process. Linux would start ``ru_maxrss`` at that of the process it was forked from."""
    try:
        with open("/proc/self/status") as status:
            (line,) = (line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    except (OSError, ValueError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # macOS, which has no /proc, counts it in bytes
