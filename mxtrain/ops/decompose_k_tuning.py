"""Find the fastest plan of all routes for one matrix product on the current GPU, and keep it."""

import functools

import torch

from mxtrain.kernels import tuning
from mxtrain.kernels.integers import next_power_of_2
from mxtrain.kernels.plan_table import Choice, gpu_of
from mxtrain.kernels.router.decompose_k_plan import (
    MAX_SPLITS,
    Plan,
    choose,
    is_valid,
    kernel_plan,
    key,
    lie_along_k,
    operation_of,
    ranges,
    tensor_core_rule,
)
from mxtrain.kernels.tuning import Search
from mxtrain.ops.decompose_k import by_plan

# What tuning varies, in this order.
FIELDS = ("splits", "block_n", "block_m", "block_k", "warps", "stages")


def tune(
    rows: int,
    columns: int,
    depth: int,
    dtype: torch.dtype,
    along_k: bool = True,
    out_dtype: torch.dtype = torch.float32,
) -> Choice:
    """Find and keep the fastest plan for the range of this product, on the current GPU.

    Args:
        rows: M; it is best to time the largest of a range.
        columns: N.
        depth: K.
        along_k: whether a and b lie in memory along K; otherwise along M and N, as in the gradient of a weight.
        out_dtype: dtype of the result.

    Returns:
        The choice from now on.

    Raises:
        RuntimeError: without a GPU.
    """
    device = tuning.gpu()
    a, b = (torch.randn(size, depth, dtype=torch.float32, device=device) for size in (rows, columns))
    a, b = a.to(dtype), b.to(dtype).t()
    if not along_k:
        a, b = a.t().contiguous().t(), b.contiguous()
    tuning.tune(search(a, b, out_dtype), device)
    return choose(rows, columns, depth, dtype, device, along_k)


def search(a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> Search:
    """The search for the fastest plan of the product of a [M, K] and b [K, N]."""

    def prepare(plan: Plan):
        return functools.partial(by_plan, a, b, None, None, out_dtype, plan)

    sizes, along_k = (a.shape[0], b.shape[1], a.shape[1]), lie_along_k(a, b)
    step = functools.partial(neighbour, itemsize=a.element_size(), shared=gpu_of(a.device).shared)
    walked_from = starts(*sizes, a.dtype, a.device, along_k)
    return Search(operation_of(along_k), key(*sizes, a.dtype), walked_from, FIELDS, step, prepare)


def starts(
    rows: int, columns: int, depth: int, dtype: torch.dtype, device: torch.device, along_k: bool
) -> tuple[Plan, ...]:
    """Plans to walk from, for every route; the current choice comes first."""
    chosen = choose(rows, columns, depth, dtype, device, along_k).plan
    kernels = kernel_plan(rows, columns, depth, dtype, device, along_k)
    tensor_cores = tensor_core_rule(*ranges(rows, columns, depth), dtype.itemsize, gpu_of(device))
    bmm = Plan("bmm", min(MAX_SPLITS, max(2, next_power_of_2(tensor_cores.splits))))
    return tuple(dict.fromkeys((chosen, kernels, tensor_cores, bmm, Plan("mm"))))


def neighbour(plan: Plan, field: str, double: bool, itemsize: int, shared: int) -> Plan | None:
    """The plan with a field doubled or halved, or one stage more or less; None where there is no such plan.

    shared: bytes of shared memory that a program may use.
    """
    value = getattr(plan, field)
    if field == "stages":
        changed = value + 1 if double else value - 1
    else:
        changed = value * 2 if double else value // 2
    plan = plan._replace(**{field: changed})
    return plan if changed != value and is_valid(plan, itemsize, shared) else None
