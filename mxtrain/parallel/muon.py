"""Muon for weights on any layout of processes, and for experts.

``torch.optim.Muon`` takes matrices only. On DTensors its iterations multiply parts of a matrix, with 11 or 16
collectives a matrix, and tall matrices get other bits than in one process. Here every process that has a part of a
matrix gathers and orthogonalizes all of it: one collective in bf16, 2 bytes a weight and step.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

import torch
from torch.distributed.tensor import DTensor, Replicate

from mxtrain.nn.split import own_part

BATCH = 2**27
"""Elements that are orthogonalized together, unless one weight has more: 256 MiB in bf16, four times in a step"""


class Muon(torch.optim.Muon):
    """``torch.optim.Muon`` whose updates are as large as AdamW's, so that AdamW's learning rate and decay fit.

    Weights [R, C] are matrices, and weights [E, R, C] are batches of them. Matrices of one shape are orthogonalized
    together. On a CPU they get the bits of ``torch.optim.Muon``; a GPU may add in another order.

    Args:
        group: the parameter group. DTensors may have any placements.
        lr, weight_decay: see ``torch.optim.Muon``. An update's root mean square is about 0.2 * lr.
    """

    def __init__(self, group: dict, lr: float, weight_decay: float):
        # PyTorch's own accepts no batches of matrices.
        super().__init__([torch.empty(0, 0)], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw")
        self.param_groups[0] |= group

    @torch.no_grad()
    def step(self, closure: Callable | None = None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        (group,) = self.param_groups
        for weights in _batches(p for p in group["params"] if p.grad is not None):
            updates = [_whole(self._momentum(p, group["momentum"]), p) for p in weights]
            matrices = orthogonalized(torch.cat(updates), group["ns_coefficients"], group["ns_steps"], group["eps"])
            rate = group["lr"] * (0.2 * math.sqrt(max(matrices.shape[1:])))
            for p, update in zip(weights, matrices.split([len(update) for update in updates])):
                own = own_part(p)
                own.mul_(1 - group["lr"] * group["weight_decay"])
                own.add_(_part(update, p).view(own.shape), alpha=-rate)
        return loss

    def _momentum(self, p: torch.Tensor, momentum: float) -> torch.Tensor:
        """Nesterov's momentum of this process's part of a weight."""
        state = self.state[p]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(p)
        gradient, mean = own_part(p.grad), own_part(state["momentum_buffer"])
        mean.lerp_(gradient, 1 - momentum)
        return gradient.lerp(mean, momentum)


def orthogonalized(x: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> torch.Tensor:
    """[n, R, C] -> bf16 [n, R, C]: each matrix with singular values near 1, as ``torch.optim.Muon`` computes them."""
    a, b, c = coefficients
    is_tall = x.shape[1] > x.shape[2]
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x


def _batches(weights: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_shape = defaultdict(list)
    for weight in weights:
        by_shape[weight.shape[-2:]].append(weight)
    for same in by_shape.values():
        count = max(1, BATCH // max(weight.numel() for weight in same))
        yield from (same[i : i + count] for i in range(0, len(same), count))


def _whole(update: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """This process's part of an update -> bf16 [n, R, C]: all of a matrix, or of the experts that it has a part of."""
    update = update.bfloat16()
    if isinstance(weight, DTensor):
        mesh, placements = weight.device_mesh, weight.placements
        split = DTensor.from_local(update, mesh, placements, shape=weight.shape, stride=weight.stride())
        whole = [p if p.is_replicate() or (weight.ndim == 3 and p.dim == 0) else Replicate() for p in placements]
        update = split.redistribute(placements=whole).to_local()
    return update if update.ndim == 3 else update[None]


def _part(update: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The reverse of ``_whole``, [n, rows, columns]."""
    if isinstance(weight, DTensor):
        (part,) = weight.__create_chunk_list__()  # what a checkpoint takes from this process
        rows, columns = (slice(start, start + size) for start, size in zip(part.offsets[-2:], part.sizes[-2:]))
        update = update[:, rows, columns]
    return update
