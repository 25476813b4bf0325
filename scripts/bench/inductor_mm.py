"""A router's matmul as a custom op that Inductor tunes: it times several implementations and keeps the fastest.

The implementations are one matmul, a batched matmul over chunks of K followed by a sum, and mxtrain's own dispatch.
For a static M, Inductor times them at M. For a dynamic M, it times them at the largest M of every range, and the
compiled graph picks the winner of the range at run time.

Only ``scripts/bench/router.py`` uses this file, as a peer. ``mxtrain.decompose_k_mm`` has its own dispatch, which needs
no compiler and times nothing.

Source: PyTorch's ``torch._inductor.kernel.custom_op``.
"""

import torch
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning

from mxtrain.formats.gemm import wide_product
from mxtrain.nn.decompose_k import op as matmul

# The ranges of M end here. The last range is open and is timed at LARGEST_M.
SPLIT_POINTS = (1, 8, 32, 128, 512)
LARGEST_M = 16384

MOST_SPLITS = 256
# Shortest chunk of K: storing and summing a shorter product takes longer than computing it.
SHORTEST_CHUNK = 128


def tuned_op(name: str, wide: bool, ranges: bool, ours: bool = True):
    """Define an op (a [M, K], b [K, N]) -> a b [M, N] without gradient. In eager mode it is one matmul.

    It takes tensors only: torch 2.11 drops other arguments when the op itself beats every choice.

    Args:
        name: the op's name, "namespace::name".
        wide: return fp32 instead of the operands' dtype.
        ranges: tune per range of M and choose at run time; for a dynamic M only. PyTorch 2.11 to 2.13 cannot compile
            ranges with different winners while ``torch.set_default_device`` is in effect.
        ours: include mxtrain's dispatch among the choices.
    """

    def out_dtype(a: torch.Tensor) -> torch.dtype:
        return torch.float32 if wide else a.dtype

    def one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul.mm(a, b, None, None, out_dtype(a))

    def chunks(a: torch.Tensor, b: torch.Tensor, splits: int) -> torch.Tensor:
        parts = a.unflatten(1, (splits, -1)).transpose(0, 1)
        return wide_product(torch.bmm, parts, b.unflatten(0, (splits, -1))).sum(0).to(out_dtype(a))

    def dispatch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul.decompose_k_mm(a, b, None, None, out_dtype(a))

    def choices(operands: dict[str, torch.Tensor]) -> list[CustomOpConfig]:
        # The first choice has no parameter, because torch 2.11 passes its parameters to the op itself.
        found = [CustomOpConfig(one)]
        found += [CustomOpConfig(chunks, splits=splits) for splits in splits_to_try(operands["a"].shape[1])]
        return [*found, CustomOpConfig(dispatch)] if ours else found

    op = torch.library.custom_op(name, one, mutates_args=())
    op.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1], dtype=out_dtype(a)))
    where = {}
    if ranges:
        where["dispatch_on"] = {"tensor_name": "a", "dim": 0, "range_upper_bound": LARGEST_M}
        where["split_points"] = list(SPLIT_POINTS)
    register_custom_op_autotuning(op, config_generator=choices, **where)
    return op


def splits_to_try(inner: int) -> list[int]:
    """Return the powers of two that divide K into chunks of at least SHORTEST_CHUNK."""
    powers = (2**i for i in range(1, MOST_SPLITS.bit_length()))
    return [splits for splits in powers if inner % splits == 0 and inner // splits >= SHORTEST_CHUNK]
