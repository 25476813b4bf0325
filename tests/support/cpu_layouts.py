"""Layouts that PyTorch has on GPUs only, for tests on a CPU: context parallelism, and expert parallelism under 0.3.

PyTorch has ring attention for CUDA's kernels only. Here every rank gathers all keys and values and attends from its
part of the sequence. And gloo exchanges equal shapes only, where every process sends others different numbers of rows.
"""

import sys

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
import torch.nn.functional as F

from mxtrain.titan.releases import RELEASE

_all_to_all = dist.all_to_all


def use_layouts_on_a_cpu() -> None:
    if RELEASE == "v02":
        use_gathered_attention()
    else:
        dist.all_to_all = all_to_all


def all_to_all(outputs: list[torch.Tensor], inputs: list[torch.Tensor], group=None, async_op: bool = False):
    """As ``torch.distributed.all_to_all``, for tensors [R, ...]."""
    if dist.get_backend(group) != "gloo":
        return _all_to_all(outputs, inputs, group, async_op)
    received = torch.cat(outputs)
    dist.all_to_all_single(received, torch.cat(inputs), [*map(len, outputs)], [*map(len, inputs)], group)
    for output, part in zip(outputs, received.split([*map(len, outputs)])):
        output.copy_(part)


# PyTorch 2.13 has renamed them.
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_gather_autograd = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

_NAME = "apply_cp_to_attention_module"
SEQUENCE = 2
"""Dimension of queries, keys and values, which are [B, heads, S, head_dim]"""


def use_gathered_attention() -> None:
    """Replace 0.2.2's ``apply_cp_to_attention_module``, also in modules that have imported it by name."""
    import torchtitan.distributed.context_parallel as titan_context

    replaced = getattr(titan_context, _NAME)
    for name, module in list(sys.modules.items()):
        if name.startswith("torchtitan.") and getattr(module, _NAME, None) is replaced:
            setattr(module, _NAME, gather_in)


def gather_in(attention_modules, cp_mesh, attention_type: str) -> None:
    """Make attention modules, all "sdpa" on a CPU, gather keys and values over ``cp_mesh``."""
    for module in attention_modules:
        module.forward = GatheredAttention(cp_mesh)


class GatheredAttention:
    """Causal attention of one rank's part of the sequence to the whole sequence.

    TorchTitan cuts the sequence into twice as many chunks as ranks, and gives rank r the r-th from the start and the
    r-th from the end, so that causal masks leave every rank as much to compute.
    """

    def __init__(self, cp_mesh):
        self._mesh = cp_mesh

    def __call__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
        is_causal: bool = True,
    ) -> torch.Tensor:
        k, v = (_gather_autograd(x.contiguous(), SEQUENCE, self._mesh) for x in (k, v))
        mask = None
        if is_causal:
            own = self._positions(q.shape[SEQUENCE], q.device)
            mask = own[:, None] >= _gather(own, 0, self._mesh)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=enable_gqa)

    def _positions(self, length: int, device: torch.device) -> torch.Tensor:
        """Return where in the whole sequence the tokens of this rank stand."""
        rank, half = self._mesh.get_local_rank(), length // 2
        chunks = torch.arange(half, device=device)
        return torch.cat([chunks + rank * half, chunks + (2 * self._mesh.size() - 1 - rank) * half])
