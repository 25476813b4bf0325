"""mxtrain in TorchTitan. A config enables it with ``experimental.custom_import = "mxtrain.titan"``.

Importing this package makes TorchTitan use the CPU if there is no accelerator. With release 0.2.2, the import also
registers mxtrain's converters and its versions of the models, also for ``-m torchtitan.train``.
"""

import math
import os
import platform
import resource
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING

import torch
import torchtitan.tools.utils as titan_utils

from mxtrain.titan.releases import engine


def _memory_stats(device=None) -> dict[str, int]:
    """Peak resident set in bytes, of this process or its parent, as the CUDA allocator's statistics."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {"active_bytes.all.peak": peak, "reserved_bytes.all.peak": peak, "num_alloc_retries": 0, "num_ooms": 0}


CPU_DEVICE = SimpleNamespace(
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


def use_cpu() -> None:
    """Make TorchTitan use the CPU, also in modules of TorchTitan that have already imported the device by name.

    Fault: on a machine without an accelerator, TorchTitan assumes the device type "cuda" and does not train. No release
    fixes this.
    """
    titan_utils.device_type, titan_utils.device_module = "cpu", CPU_DEVICE
    # Unknown. TorchTitan would take the peak of an A100, and report a meaningless MFU.
    titan_utils.get_peak_flops = lambda device_name: math.nan
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, "device_type", None) == "cuda":
            module.device_type = "cpu"
            if hasattr(module, "device_module"):
                module.device_module = CPU_DEVICE


# First, because TorchTitan's modules copy the device type when they are imported.
if not torch.cuda.is_available():
    use_cpu()

# Type checkers see this declaration only: it has the arguments of the other one, too.
if TYPE_CHECKING:
    from mxtrain.titan.v03.engine import override_with_mxtrain as override_with_mxtrain
    from mxtrain.titan.v03.engine import with_mxtrain
else:
    engine().register()
    with_mxtrain = engine().with_mxtrain
    if hasattr(engine(), "override_with_mxtrain"):  # 0.2.2 has no overrides
        override_with_mxtrain = engine().override_with_mxtrain

__all__ = ["with_mxtrain"]
