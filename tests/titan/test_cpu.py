import subprocess
import sys

import pytest

CODE = """
import math
import torch
torch.cuda.is_available = lambda: False
import torchtitan.components.metrics  # imports the device by name before mxtrain is
from mxtrain.titan import CPU_DEVICE
import torchtitan.tools.utils as utils
from torchtitan.components import metrics
assert utils.device_type == metrics.device_type == "cpu", (utils.device_type, metrics.device_type)
assert utils.device_module is metrics.device_module is CPU_DEVICE
assert 0 < metrics.build_device_memory_monitor().get_peak_stats().max_reserved_pct < 100
assert math.isnan(metrics.utils.get_peak_flops("a CPU"))
"""


@pytest.mark.sweep
def test_titan_uses_the_cpu_also_in_modules_that_have_imported_the_device():
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
