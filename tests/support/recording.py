"""What a trainer of the oracle does besides training: it writes gradients, and may follow another run's weights.

``record_all`` and ``record_perturbed`` are called in a process before its first run. ``oracle`` reads the files.
"""

from hashlib import sha256
from pathlib import Path

import torch

FOLLOWS = "starts every step from the weights of "
"""In front of a folder in ``job.description``, which nothing else uses"""


def record_all() -> None:
    """Make every trainer of this process write its full gradients before they are clipped, and follow another run."""
    import torchtitan.distributed.utils as dist_utils

    from mxtrain.titan.releases import engine

    Trainer = engine().Trainer
    clip, train_step = dist_utils.clip_grad_norm_, Trainer.train_step
    trainers = []

    def record_and_clip(*args, **kwargs):
        _record(trainers[-1])
        return clip(*args, **kwargs)

    def train_step_of(trainer, data_iterator):
        trainers[:] = [trainer]
        _follow(trainer)
        return train_step(trainer, data_iterator)

    dist_utils.clip_grad_norm_, Trainer.train_step = record_and_clip, train_step_of


def record_perturbed() -> None:
    """Do as ``record_all``, and change the initial weights by normal random shares with a deviation of 1e-7."""
    from mxtrain.titan.releases import engine

    Trainer = engine().Trainer
    record_all()
    train_step = Trainer.train_step

    def train_step_of(trainer, data_iterator):
        if trainer.step == 1:
            for _, parameter in _named_parameters(trainer):
                parameter.data.mul_(1 + 1e-7 * torch.randn_like(parameter))
        return train_step(trainer, data_iterator)

    Trainer.train_step = train_step_of


@torch.no_grad()
def _follow(trainer) -> None:
    """Take the weights of the run to follow, which must be nearly those that this run's optimizer has made."""
    _, follows, folder = trainer.job_config.job.description.partition(FOLLOWS)
    if not follows:
        return
    weights = torch.load(Path(folder) / f"gradients-{trainer.step}-0.pt")["weights"]
    for name, parameter in _named_parameters(trainer):
        ours, full = parameter, weights[name].to(parameter.device)
        if hasattr(parameter, "full_tensor"):
            (shard,) = parameter.__create_chunk_list__()  # the part that a checkpoint takes from this rank
            full = full[tuple(slice(start, start + size) for start, size in zip(shard.offsets, shard.sizes))]
            ours = parameter.to_local()
        difference = (ours - full).norm() / full.norm().clamp(min=1e-30)
        assert difference <= 1e-3, f"step {trainer.step}: {name} differs by {difference:.3g} before it follows"
        ours.copy_(full)


def _named_parameters(trainer) -> list[tuple[str, torch.nn.Parameter]]:
    return _named(trainer, torch.nn.Module.named_parameters)


def _named(trainer, of_module) -> list[tuple[str, torch.Tensor]]:
    from mxtrain.titan.releases import engine

    name_of = engine().saved_name
    return [(name_of(name), value) for part in trainer.model_parts for name, value in of_module(part)]


@torch.no_grad()
def _record(trainer) -> None:
    """Write all digests, and those gradients for which this is the first rank. One process writes its weights, too.

    The biases that balance the load of experts are among the gradients: they must be the same on all layouts, too.
    """
    parameters = _named_parameters(trainer)
    full = {name: _full(parameter.grad) for name, parameter in parameters if parameter.grad is not None}
    buffers = _named(trainer, torch.nn.Module.named_buffers)
    full |= {name: _full(buffer) for name, buffer in buffers if name.endswith("expert_bias")}
    names, rank = [list(full)], 0
    if torch.distributed.is_initialized():
        names, rank = [None] * torch.distributed.get_world_size(), torch.distributed.get_rank()
        torch.distributed.all_gather_object(names, list(full))
    others = {name for before in names[:rank] for name in before}
    record = {
        "digests": {name: sha256(tensor.cpu().numpy().tobytes()).hexdigest() for name, tensor in full.items()},
        "gradients": {name: tensor.cpu() for name, tensor in full.items() if name not in others},
        "weights": {name: _full(parameter).cpu() for name, parameter in parameters} if len(names) == 1 else {},
    }
    torch.save(record, Path(trainer.job_config.job.dump_folder) / f"gradients-{trainer.step}-{rank}.pt")


def _full(tensor: torch.Tensor) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.detach().float().contiguous()  # without TorchTitan 0.3's attributes, which no file takes
