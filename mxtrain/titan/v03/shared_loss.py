"""The loss of a pipeline's last stage on the ranks of all stages, which TorchTitan 0.3 leaves at -1."""

import torch
import torch.distributed as dist


class SharedLoss:
    """A pipeline schedule whose ``eval`` gives the loss to the ranks of all stages.

    Args:
        schedule: PyTorch's schedule.
        has_last_stage: whether the last stage is on this rank.
        group: the ranks of one pipeline.
        device: where the loss is.
    """

    def __init__(self, schedule, has_last_stage: bool, group: dist.ProcessGroup, device: torch.device):
        self._schedule, self._has_last_stage, self._group, self._device = schedule, has_last_stage, group, device

    def eval(self, *, target_mbs: list[torch.Tensor], losses: list[torch.Tensor], **kwargs) -> None:
        """Run all forwards, and append the sum of the microbatches' losses, fp32 [], to ``losses``."""
        own: list[torch.Tensor] | None = [] if self._has_last_stage else None
        self._schedule.eval(target_mbs=target_mbs if self._has_last_stage else None, losses=own, **kwargs)
        losses.append(shared(torch.stack(own).sum() if own else None, self._group, self._device))


def shared(loss: torch.Tensor | None, group: dist.ProcessGroup, device: torch.device) -> torch.Tensor:
    """The loss of the rank of ``group`` that has one, on all of them."""
    total = torch.zeros((), device=device) if loss is None else loss.detach().to(device, copy=True)
    dist.all_reduce(total, group=group)  # adds zeros, and 0 + NaN is NaN
    return total
