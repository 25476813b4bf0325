import subprocess
import sys

CODE = """
import builtins
import ctypes
import io
import math
import resource
import torch
torch.cuda.is_available = lambda: False
import torchtitan.components.metrics  # imports the device by name before mxtrain is
import mxtrain.titan
from mxtrain.titan.cpu import CpuDevice
import torchtitan.tools.utils as utils
from torchtitan.components import metrics
assert utils.device_type == metrics.device_type == "cpu", (utils.device_type, metrics.device_type)
assert utils.device_module is metrics.device_module is CpuDevice
monitor = metrics.build_device_memory_monitor()
before = monitor.get_peak_stats().max_reserved_gib
held = torch.ones(2**26)  # 0.25 GiB; the peak so far may be a little above the memory in use now
after = monitor.get_peak_stats().max_reserved_gib
assert before + 0.1 < after < before + 0.4, (before, after)
assert math.isnan(metrics.utils.get_peak_flops("a CPU"))

# Without VmHWM, as on gVisor, and without /proc: the peak of getrusage, which has that of the parent process, too.
def status(content):
    def opened(path, *args, **options):
        if str(path) != "/proc/self/status": return original(path, *args, **options)
        if content is None: raise FileNotFoundError(path)
        return io.StringIO(content)
    return opened
original = builtins.open
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
for content in ("VmRSS: 5 kB", None):
    builtins.open = io.open = status(content)
    assert peak <= monitor.get_peak_stats().max_reserved_gib < peak + 0.1, (peak, content)
builtins.open = io.open = original
assert 0 < monitor.get_peak_stats().max_reserved_pct < 100

# The count of blocks that glibc has mapped one by one, which it gives back when they are freed. Page faults alone vary:
# a small block behind the freed ones may keep them, too.
class Mallinfo(ctypes.Structure):
    _fields_ = [(f"field{i}", ctypes.c_int) for i in range(10)]
mallinfo = ctypes.CDLL(None).mallinfo
mallinfo.restype = Mallinfo
mapped = mallinfo().field3
large = torch.ones(31 * 2**18)  # 31 MiB
assert mallinfo().field3 == mapped, (mallinfo().field3, mapped)

def page_faults(): return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for step in range(20):
    if step == 2: before = page_faults()
    tensors = [torch.ones(2**20) for _ in range(8)]  # 1024 pages each
    del tensors
assert page_faults() - before < 18 * 8 * 1024 / 4, page_faults() - before
"""


def test_titan_uses_the_cpu_also_in_modules_that_have_imported_the_device_and_memory_is_kept():
    ballast = bytearray(2**30)  # resident here, in the parent process, whose memory is not the child's
    ballast[::4096] = b"1" * len(ballast[::4096])
    process = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]
