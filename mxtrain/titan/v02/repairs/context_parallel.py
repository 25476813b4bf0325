"""Fault: context parallelism counts the tokens of a sequence on every rank. Mended in TorchTitan 0.3.0.

All ranks of a context-parallel group read the same sequences, and each computes a part of every sequence. TorchTitan
counts whole sequences on every rank where it adds up the ranks' counts, or divides a part's loss by the tokens of
whole sequences. Texts have no tokens without a label, so all parts have the same number of tokens.

Training itself is right: the loss is divided by the tokens of whole sequences, and gradients are added up.
"""

import torch
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torchtitan.models.qwen3.model.model import Qwen3Model


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
