import pytest
import torch
from filelock import FileLock

from mxtrain.formats.hardware import HAS_TRITON

if not HAS_TRITON:
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def device():
    """Make the GPU the default device of a test, or the CPU where Triton interprets kernels."""
    from mxtrain.launch.launch import INTERPRETED

    name = "cpu" if INTERPRETED else "cuda"
    if name == "cuda" and not torch.cuda.is_available():
        pytest.skip("TRITON_INTERPRET is off and there is no GPU")
    torch.set_default_device(name)
    yield name
    torch.set_default_device(None)


@pytest.fixture
def huge(device, tmp_path_factory):
    """Gaussian bf16 rows [524304, 4128] on a GPU: the offsets of the last ones exceed 32 bits.

    One test at a time has them: several pytest workers that test with such rows at once need more memory than a GPU
    has, and one of them fails.
    """
    rows, columns, needed = 524304, 4096 + 32, 30 * 2**30
    assert rows * columns > 2**31
    with FileLock(tmp_path_factory.getbasetemp().parent / "huge.lock"):
        if torch.cuda.mem_get_info()[0] < needed:
            pytest.skip(f"needs {needed >> 30} GiB of free GPU memory")
        x = torch.randn(rows, columns, generator=torch.Generator("cuda").manual_seed(0), dtype=torch.bfloat16)
        yield x
        x.untyped_storage().resize_(0)  # pytest holds the tensor
        torch.cuda.empty_cache()  # for the other workers
