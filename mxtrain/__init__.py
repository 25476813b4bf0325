"""MXNorm and MX linear layers for low-precision pretraining with TorchTitan.

Public names are imported on first use, so ``import mxtrain`` and the command line start without PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

_PUBLIC = {
    "norm_constant": "mxtrain.formats.estimate",
    "Recipe": "mxtrain.formats.recipe",
    "mxnorm_cast": "mxtrain.norms.mxnorm",
    "static_tensor_scale": "mxtrain.formats",
    "set_rounding_step": "mxtrain.rng.rounding",
    "decompose_k_mm": "mxtrain.nn.decompose_k.router",
    "MXNorm": "mxtrain.nn.mxnorm",
    "MXNormLinear": "mxtrain.nn.mxnorm",
    "MXLinear": "mxtrain.nn.mx_linear",
    "rms_norm": "mxtrain.norms.rms_norm",
    "FusedRMSNorm": "mxtrain.norms.rms_norm",
    "layer_norm": "mxtrain.norms.layer_norm",
    "FusedLayerNorm": "mxtrain.norms.layer_norm",
    "DecomposeKRouter": "mxtrain.nn.decompose_k.router",
    "convert": "mxtrain.conversion.convert",
    "ConfigError": "mxtrain.errors",
}

__all__ = list(_PUBLIC)
__version__ = "0.2.0"

# Type checkers see no names that a function finds, and with the function they would accept any name.
if TYPE_CHECKING:
    from mxtrain.conversion.convert import convert as convert
    from mxtrain.errors import ConfigError as ConfigError
    from mxtrain.formats import static_tensor_scale as static_tensor_scale
    from mxtrain.formats.estimate import norm_constant as norm_constant
    from mxtrain.formats.recipe import Recipe as Recipe
    from mxtrain.nn.decompose_k.router import DecomposeKRouter as DecomposeKRouter
    from mxtrain.nn.decompose_k.router import decompose_k_mm as decompose_k_mm
    from mxtrain.nn.mx_linear import MXLinear as MXLinear
    from mxtrain.nn.mxnorm import MXNorm as MXNorm
    from mxtrain.nn.mxnorm import MXNormLinear as MXNormLinear
    from mxtrain.norms.layer_norm import FusedLayerNorm as FusedLayerNorm
    from mxtrain.norms.layer_norm import layer_norm as layer_norm
    from mxtrain.norms.mxnorm import mxnorm_cast as mxnorm_cast
    from mxtrain.norms.rms_norm import FusedRMSNorm as FusedRMSNorm
    from mxtrain.norms.rms_norm import rms_norm as rms_norm
    from mxtrain.rng.rounding import set_rounding_step as set_rounding_step
else:

    def __getattr__(name: str):
        if name not in _PUBLIC:
            raise AttributeError(f"module 'mxtrain' has no attribute {name!r}")
        return getattr(import_module(_PUBLIC[name]), name)

    def __dir__():
        return sorted(__all__)
