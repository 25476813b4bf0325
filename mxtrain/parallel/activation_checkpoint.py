"""Selective activation checkpointing that knows mxtrain's operations: what a layer keeps for its backward.

With ``activation_checkpoint.mode = "selective"`` and option "op", TorchTitan 0.2.2 keeps the results of attention and
of every second ``aten.mm``, and computes everything else again. It does not know the operations below.

An operation is worth keeping by the bytes of memory traffic that a kept byte saves. A product of bf16 results with K
summands takes K operations per byte, and an H200 computes about 110 operations while it moves a byte. In a layer of
Llama 3 8B (K = 4096) on an H200:

    result                          bytes kept       saved per byte   kept
    product                         2 per element    37               as TorchTitan keeps those of aten.mm
    attention                       2 per element    more             yes; TorchTitan knows the kernels of GPUs
    tensor scales of NVFP4          4 or 8           millions         yes: the same for fprop and dgrad
    codes and scales of MXFP8       1.03 per element 3                no
    images (emulated operands)      2 per element    2                no
    rho                             4 per token      none             no: comes with the operand, see below

Codes would come on top: norm, attention and SwiGLU need their bf16 inputs for the backward in any case, and a product
saves twelve times as much for the same bytes. rho is free, because the products that are computed again need their
operand, so the norm and cast runs again. (MX tensor cores multiply about five times as fast: a product then saves 7.)

The linears of a norm could be one product forward (``mxtrain.nn.group``), which would be kept or computed again as a
whole: 86 KB per token of a layer of Llama 3 8B instead of 56. So under this option they multiply one by one forward.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.utils.checkpoint
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from mxtrain.formats.gemm import guarded_mm
from mxtrain.formats.matrices import ELEMENTS_PER_BYTE
from mxtrain.formats.mx.merged import merged_mm
from mxtrain.formats.recipe import FORMATS
from mxtrain.nn.decompose_k.op import decompose_k_mm
from mxtrain.nn.mxnorm import MXNorm

PRODUCTS = (
    torch.ops.aten._scaled_mm_v2.default,  # of codes and scales: mode "native"
    merged_mm,  # the same in mode "fp8_merged"
    guarded_mm,  # of values, where PyTorch's settings or the result's dtype do not fit
    decompose_k_mm,  # a router's logits
)
"""Products of two matrices, the second of them [K, N]: kept and counted as ``aten.mm`` is"""

KEPT = (torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,)  # so that a CPU keeps what a GPU keeps
"""Operations whose results are always kept, beside those of the formats (``FormatOps.kept``)"""

LABELS = (
    torch.ops.profiler._record_function_enter_new.default,
    torch.ops.profiler._record_function_exit._RecordFunction,
)
"""Labels in profiles. PyTorch 2.13 takes them for operations, and stops where FSDP gathers the weights of experts, with
other labels, when a layer is computed again"""


@contextmanager
def knows_own_operations() -> Iterator[None]:
    """While active, TorchTitan's ``apply_ac`` treats ``PRODUCTS`` as it treats ``aten.mm``, and keeps ``KEPT``.

    From now on, all selective checkpointing of this process ignores ``LABELS``.
    """
    torch.utils.checkpoint.SAC_IGNORED_OPS.update(LABELS)

    def contexts(policy, *args, **kwargs):
        return create_selective_checkpoint_contexts(_with_own_operations(policy), *args, **kwargs)

    # TorchTitan imports the function when it wraps a layer.
    with patch.object(torch.utils.checkpoint, create_selective_checkpoint_contexts.__name__, contexts):
        yield


def multiply_one_by_one(model: torch.nn.Module) -> None:
    """Let the linears of a norm multiply one by one forward, so that each output is kept or computed again alone."""
    for module in model.modules():
        if isinstance(module, MXNorm) and module.group is not None:
            module.group.joins_fprop = False


def _with_own_operations(policy: Callable) -> Callable:
    kept = {*KEPT, *(op for fmt in FORMATS.values() for op in fmt.ops.kept)}

    def decide(ctx, func, *args, **kwargs) -> CheckpointPolicy:
        if func in kept:
            return CheckpointPolicy.MUST_SAVE
        if func in PRODUCTS:
            return policy(ctx, torch.ops.aten.mm.default, args[0], _matrix(args[1]))
        return policy(ctx, func, *args, **kwargs)

    return decide


def _matrix(b: torch.Tensor) -> torch.Tensor | SimpleNamespace:
    """The second factor, or its shape in elements: TorchTitan compares it with the shapes that the settings name."""
    elements = ELEMENTS_PER_BYTE.get(b.dtype, 1)
    return b if elements == 1 else SimpleNamespace(shape=torch.Size((elements * b.shape[0], b.shape[1])))
