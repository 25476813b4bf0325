"""TorchTitan 0.3's container of optimizers with Muon: its own DistMuon, where that can train all matrices."""

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer
from torchtitan.components.optimizer import OptimizersContainer
from torchtitan.distributed.flex_shard import BucketConfig, ComputeLayout, Owned, build_dist_muon

from mxtrain.parallel.muon import Muon
from mxtrain.titan.muon import give_matrices_to_muon


class MuonConfig(OptimizersContainer.Config):
    """Builds one AdamW for each part of a model, which then gives its matrices to Muon."""

    def build(self, **parts) -> OptimizersContainer:
        optimizers = super().build(**parts)
        give_matrices_to_muon(optimizers, build)
        return optimizers


def build(group: dict, lr: float, weight_decay: float) -> Optimizer:
    """DistMuon, or ``Muon`` if a weight of the group is not split as DistMuon wants. Both save the same states.

    DistMuon orthogonalizes every matrix on one GPU instead of on all. It takes DTensors on several GPUs: matrices that
    are split along one axis of the mesh, and experts that are split as whole matrices.
    """
    layouts = {name: _layout(weight) for name, weight in zip(group["param_names"], group["params"])}
    if None in layouts.values():
        return Muon(group, lr, weight_decay)
    # The weights of a bucket are sent together, and memory for them is held.
    blocks = dict.fromkeys(".".join(name.split(".")[:2]) for name in layouts)
    return build_dist_muon(
        [{**group, "lr": lr, "weight_decay": weight_decay, "adjust_lr_fn": "match_rms_adamw"}],
        compute_sharding_by_fqn=layouts,
        bucket_configs=[BucketConfig((f"{block}.*",)) for block in blocks],
    )


def _layout(weight: torch.Tensor) -> ComputeLayout | None:
    """Where DistMuon is to orthogonalize a weight, or None."""
    if not (isinstance(weight, DTensor) and weight.is_cuda):
        return None
    mesh = weight.device_mesh
    axes = zip(mesh.mesh_dim_names, weight.placements, mesh.shape)
    split = {name: placement for name, placement, size in axes if size > 1 and not placement.is_replicate()}
    if weight.ndim == 3 and split and all(placement.dim == 0 for placement in split.values()):
        return ComputeLayout(dict.fromkeys(split, Shard(0)))
    if weight.ndim == 2 and [*map(type, split.values())] == [Shard]:
        return ComputeLayout(dict.fromkeys(split, Owned()))
    return None
