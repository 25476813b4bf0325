"""Context parallelism: what is counted, and attention on a CPU."""

import os

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from mxtrain.analysis import load_run
from mxtrain.titan.v02.context_parallel import share_of_validation_loss, tokens_of_other_ranks
from tests.support import sharded_runs
from tests.support.forked import ENVIRONMENT, forking_context


@pytest.mark.parametrize("name, of_one", [("cp 2, validated, mxfp8", "validated"), ("qwen3, cp 2", "qwen3")])
def test_rows_and_validation_are_those_of_one_process(base, name, of_one):
    found, expected = sharded_runs.on_two(base)[name], sharded_runs.on_one_after_two(base)[of_one]
    assert [row["tokens_seen"] for row in found.rows] == [row["tokens_seen"] for row in expected.rows]
    for row, expected_row in zip(found.rows, expected.rows, strict=True):
        assert row["loss"] == pytest.approx(expected_row["loss"], rel=1e-3)
        # The larger of two halves' losses.
        assert row["loss"] < row["max_loss"] < 1.1 * row["loss"]
    validation = [[row["validation_loss"] for row in load_run(run.folder).validation] for run in (found, expected)]
    assert len(validation[0]) == 2 and validation[0] == pytest.approx(validation[1], rel=1e-3)


def test_a_run_goes_on_on_one_process_with_the_same_text_and_token_count(base):
    rows, expected = sharded_runs.on_one_after_two(base)["resumed"].rows, sharded_runs.on_one_after_two(base)
    expected = expected["validated"].rows
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert [row["tokens_seen"] for row in rows] == [row["tokens_seen"] for row in expected]
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected], rel=5e-3)


def test_parts_add_up_to_the_whole():
    labels = torch.zeros(3, 64, dtype=torch.int64)
    assert tokens_of_other_ranks(labels, 1) == 0 and tokens_of_other_ranks(labels, 4) == 144
    loss_fn = share_of_validation_loss(lambda predictions, labels: predictions.sum(), 4)
    assert loss_fn(torch.ones(8), labels).item() == 2.0


RANKS, SHAPE = 2, (2, 4, 64, 8)


def _attend(folder, rank: int) -> None:
    """Attend with this rank's part of the sequence, and save output and gradients."""
    os.environ.update(ENVIRONMENT)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    import mxtrain.titan  # noqa: F401
    from mxtrain.titan.v02.context_parallel import GatheredAttention

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
