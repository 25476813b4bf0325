"""TorchTitan 0.3's container of optimizers with Muon."""

from dataclasses import dataclass

from torchtitan.components.optimizer import OptimizersContainer

from mxtrain.titan.muon import give_matrices_to_muon


class MuonContainer(OptimizersContainer):
    """``OptimizersContainer`` of one AdamW for each part of a model, which then gives its matrices to Muon."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    def __init__(self, config: Config, *, model_parts):
        super().__init__(config, model_parts=model_parts)
        give_matrices_to_muon(self)
