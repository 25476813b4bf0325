"""Converter for an ablation: the gains of MXNorms start at 0.69 in place of 1.

The estimator post_round takes block maxima as the rounded block scales stand for them, never smaller than they are. On
Gaussian rows its estimate is 1.40 to 1.54 times the true RMS, depending on the size of the elements, so its norms
pass on about 0.69 of what RMSNorm does. Is such a smaller gain all that post_round changes? ``small_gain`` comes after
mxnorm with the estimator "exact". small_gain.toml in this folder trains llama3_125m with it.
"""

import torch
from torchtitan.protocols.model_converter import register_model_converter

from mxtrain.errors import ConfigError
from mxtrain.nn.mxnorm import MXNorm

GAIN = 0.69


def start_small(norm: MXNorm) -> None:
    if norm.weight is not None:
        torch.nn.init.constant_(norm.weight, GAIN)


class SmallGain:
    def __init__(self, job_config, parallel_dims):
        pass

    def convert(self, model: torch.nn.Module) -> None:
        if not any(isinstance(module, MXNorm) for module in model.modules()):
            raise ConfigError("model.converters: 'small_gain' comes after 'mxnorm'")
        # TorchTitan gives parameters their first values after it has converted and sharded the model.
        MXNorm.reset_parameters = start_small

    def post_optimizer_hook(self, model) -> None:
        pass


register_model_converter(SmallGain, "small_gain")
