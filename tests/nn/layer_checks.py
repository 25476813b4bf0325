"""What tests of layers share: numbers to feed them, and two processes to shard them over."""

import socket
from collections.abc import Callable

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh


def draw(*shape: int, seed: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> torch.Tensor:
    """Gaussian numbers, the same on every device."""
    generator = torch.Generator("cpu").manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu") * scale
    return x.to(dtype).to(torch.get_default_device())


def in_two_processes(check: Callable, device: str) -> None:
    """Call ``check(mesh)`` in two processes that are joined by gloo, on the CPU only; ``check`` is a module's own."""
    if device != "cpu":
        pytest.skip("two processes of gloo, on the CPU")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    torch.multiprocessing.spawn(_process, (check, port), nprocs=2)


def _process(rank: int, check: Callable, port: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    check(init_device_mesh("cpu", (2,)))
    # The last transfer goes one way: its sender must not be gone before it has arrived.
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
