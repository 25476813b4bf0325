"""Fault: DDP averages gradients of a loss that is divided by all tokens. Mended in TorchTitan 0.3.0.

Repair: replicas run FSDP2 with a single shard.
"""

from torchtitan.distributed import ParallelDims


class Layout(ParallelDims):
    """TorchTitan's layout, with FSDP on every layout of several processes, also where there is nothing to shard.

    With replicas only, TorchTitan 0.2.2 uses DDP, which averages gradients, although the loss is already divided by the
    tokens of all replicas: with two replicas gradients are half as large as in one process. FSDP on a mesh of
    (replicas, 1 shard) adds them up, because TorchTitan switches FSDP's own division off.

    With pipeline or tensor parallelism only, TorchTitan 0.2.2 ignores ``training.mixed_precision_param``. FSDP on a
    mesh of 1 shard applies it there as on every other layout, and needs no communication.
    """

    @property
    def fsdp_enabled(self) -> bool:
        return self.world_size > 1

    def _mesh_exist(self, name: str, degree: int) -> bool:
        # The group of a mesh that does not exist is a fake one.
        return (name == "fsdp" and self.fsdp_enabled) or super()._mesh_exist(name, degree)
