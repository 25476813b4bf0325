"""Fault: context parallelism counts the tokens of a sequence on every rank. Mended in TorchTitan 0.3.0.

All ranks of a context-parallel group read the same sequences, and each computes a part of every sequence. TorchTitan
counts whole sequences on every rank where it adds up the ranks' counts, or divides a part's loss by the tokens of
whole sequences. Texts have no tokens without a label, so all parts have the same number of tokens.

Training itself is right: the loss is divided by the tokens of whole sequences, and gradients are added up.
"""

import sys

import torch
import torch.nn.functional as F
import torchtitan.distributed.context_parallel as titan_context
from torchtitan.models.qwen3.model.model import Qwen3Model

from mxtrain.launch.pytorch import functional_collectives as collectives
from mxtrain.launch.pytorch import set_rotate_method


def prepare_context_parallelism(parallel_dims, job_config) -> None:
    """Let attention exchange keys and values as the job says, also before the first validation."""
    if parallel_dims.cp_enabled:
        set_rotate_method(job_config.parallelism.context_parallel_rotate_method)


def tokens_of_other_ranks(labels: torch.Tensor, cp: int) -> int:
    """Return how many of the tokens that a rank has read are computed by the other ranks of its group.

    Args:
        labels: of whole sequences, [B, S].
        cp: degree of context parallelism.
    """
    return labels.numel() - labels.numel() // cp


def share_of_validation_loss(loss_fn, cp: int):
    """Wrap a validator's ``loss_fn``. The validator counts the tokens of one part, and adds up the losses of all."""
    if cp == 1:
        return loss_fn
    return lambda predictions, labels: loss_fn(predictions, labels) / cp


def correct_max_loss(metrics_processor, cp: int) -> None:
    """Make ``metrics_processor.log`` take a loss of a part, divided by the tokens of the whole, as the largest loss."""
    if cp == 1:
        return
    log = metrics_processor.log

    def log_corrected(step, global_avg_loss, global_max_loss, *args, **kwargs):
        log(step, global_avg_loss, global_max_loss * cp, *args, **kwargs)

    metrics_processor.log = log_corrected


if not hasattr(Qwen3Model, "freqs_cis"):
    # TorchTitan's validator reads it from every model under context parallelism, and makes no use of it.
    Qwen3Model.freqs_cis = property(lambda model: model.rope_cache)


# Fault: context parallelism has no attention on a CPU. No release mends it. PyTorch has ring attention for CUDA's
# kernels only, and raises for a CPU's. Here every rank gathers all keys and values and attends from its part of the
# sequence. It needs memory for whole keys and values: for tests and small runs.

# PyTorch 2.13 has renamed them.
_gather = getattr(collectives, "all_gather_single", None) or collectives.all_gather_tensor
_gather_autograd = getattr(collectives, "all_gather_single_autograd", None) or collectives.all_gather_tensor_autograd

_NAME = "apply_cp_to_attention_module"
SEQUENCE = 2
"""Dimension of queries, keys and values, which are [B, heads, S, head_dim]"""


def use_gathered_attention() -> None:
    """Replace ``apply_cp_to_attention_module``, also in modules of TorchTitan that have imported it by name."""
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
