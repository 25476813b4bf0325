"""The matmul of a router as an op that Inductor tunes: it times several ways to write it and keeps the fastest.

The ways are those of ``ops.decompose_k``: one matmul, a batched matmul over chunks of K with a sum over them, and the
dispatch itself. Where M is dynamic, Inductor times them at the largest M of every range while it compiles the graph,
and the graph takes at run time what won in the range of its M; otherwise it times them at M. What follows the sum is
fused with it, as in any other graph.

``mxtrain.decompose_k_mm`` does not use it: its own dispatch needs no compiler and times nothing. Public from here are
``decompose_k_mm`` and ``tuned_op``; ``scripts/bench/router.py`` measures both against the dispatch.

Source: PyTorch's ``torch._inductor.kernel.custom_op``.
"""

import torch
from torch._inductor.kernel.custom_op import CustomOpConfig, register_custom_op_autotuning
from torch.fx.experimental.symbolic_shapes import has_static_value

from mxtrain.kernels.router.decompose_k_plan import Plan
from mxtrain.ops import decompose_k as matmul
from mxtrain.reference.decompose_k import finish

# Where ranges of M end. The last range has no end, and is timed at LARGEST_M.
SPLIT_POINTS = (1, 8, 32, 128, 512)
LARGEST_M = 16384

MOST_SPLITS = 256
# Of K; the products of shorter ones do less than it takes to store and to sum them.
SHORTEST_CHUNK = 128


def tuned_op(name: str, wide: bool, ranges: bool, ours: bool = True):
    """Define an op (a [M, K], b [K, N]) -> a b [M, N]. Outside of compiled graphs it is one matmul. It has no gradient.

    Its arguments are tensors only: torch 2.11 loses all others where the op itself is faster than every choice.

    Args:
        name: of the op, "namespace::name".
        wide: whether the result is fp32; otherwise it has the dtype of the operands.
        ranges: choose for ranges of M, and again at run time: for a dynamic M, and not for another. PyTorch (2.11 to
            2.13) cannot compile ranges with different choices while ``torch.set_default_device`` is in effect.
        ours: whether mxtrain's dispatch is one of the choices.
    """

    def out_dtype(a: torch.Tensor) -> torch.dtype:
        return torch.float32 if wide else a.dtype

    def by_plan(a: torch.Tensor, b: torch.Tensor, plan: Plan) -> torch.Tensor:
        return matmul.by_plan(a, b, None, None, out_dtype(a), plan)

    def one(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return by_plan(a, b, Plan("mm"))

    def chunks(a: torch.Tensor, b: torch.Tensor, splits: int) -> torch.Tensor:
        return by_plan(a, b, Plan("bmm", splits))

    def dispatch(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return matmul.decompose_k_mm(a, b, None, None, out_dtype(a))

    def choices(operands: dict[str, torch.Tensor]) -> list[CustomOpConfig]:
        # The first has no parameter: torch 2.11 calls the op itself with those of the first.
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
    """Powers of two that divide K and leave chunks worth multiplying."""
    powers = (2**i for i in range(1, MOST_SPLITS.bit_length()))
    return [splits for splits in powers if inner % splits == 0 and inner // splits >= SHORTEST_CHUNK]


_OPS = {
    (wide, ranges): tuned_op(
        f"mxtrain::inductor_mm{'_wide' if wide else ''}{'_by_range' if ranges else ''}", wide, ranges
    )
    for wide in (False, True)
    for ranges in (False, True)
}


def decompose_k_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """``mxtrain.decompose_k_mm`` without gradient, for graphs that Inductor compiles, which tunes it.

    Raises:
        ValueError: for the same arguments as ``mxtrain.decompose_k_mm``.
    """
    matmul.check_operands(a, b, bias, epilogue, out_dtype)
    out_dtype = out_dtype or a.dtype
    # A rounded product is as good where nothing but relu follows.
    wide = out_dtype != a.dtype or bias is not None or epilogue not in (None, "relu")
    product = _OPS[wide, not has_static_value(a.shape[0])](a, b)
    return finish(product, bias, epilogue, out_dtype)
