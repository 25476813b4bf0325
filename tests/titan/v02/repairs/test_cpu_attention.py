"""Repair of 0.2.2: gathered attention against PyTorch's attention to whole sequences, forward and backward."""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tests.support.forked import ENVIRONMENT, forking_context

RANKS, SHAPE = 2, (2, 4, 64, 8)


def _attend(folder, rank: int) -> None:
    """Attend with this rank's part of the sequence, and save output and gradients."""
    os.environ.update(ENVIRONMENT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    import mxtrain.titan  # noqa: F401
    from mxtrain.titan.v02.repairs.cpu_attention import GatheredAttention

    mesh = dist.init_device_mesh("cpu", (RANKS,))
    attention = GatheredAttention(mesh)
    for is_causal in (True, False):
        parts = [part(x, rank).requires_grad_() for x in inputs()]
        out = attention(*parts, enable_gqa=True, is_causal=is_causal)
        (out * part(target(), rank)).sum().backward()
        torch.save([out.detach(), *(x.grad for x in parts)], f"{folder}/{is_causal}-{rank}.pt")
    dist.destroy_process_group()


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    few = (SHAPE[0], 2, *SHAPE[2:])
    return [torch.randn(shape, generator=generator) for shape in (SHAPE, few, few)]


def target() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(2))


def part(x: torch.Tensor, rank: int) -> torch.Tensor:
    """Return the part of rank 0, which has the first and last quarter of a sequence, or of rank 1."""
    chunks = x.chunk(2 * RANKS, dim=2)
    return torch.cat([chunks[rank], chunks[-1 - rank]], dim=2).clone()


def test_parts_attend_like_the_whole(tmp_path):
    workers = [forking_context().Process(target=_attend, args=(str(tmp_path), rank)) for rank in range(RANKS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(100)
    assert [worker.exitcode for worker in workers] == [0] * RANKS
    for is_causal in (True, False):
        whole = [x.requires_grad_() for x in inputs()]
        out = F.scaled_dot_product_attention(*whole, is_causal=is_causal, enable_gqa=True)
        (out * target()).sum().backward()
        expected = [out.detach(), *(x.grad for x in whole)]
        for rank in range(RANKS):
            for ours, theirs in zip(torch.load(tmp_path / f"{is_causal}-{rank}.pt"), expected, strict=True):
                torch.testing.assert_close(ours, part(theirs, rank), rtol=1e-5, atol=1e-5)
