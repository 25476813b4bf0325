"""MXNorm and MX linear layers for low-precision pretraining with TorchTitan.

The public names below are imported on first use, so that ``import mxtrain`` (and with it the
command line) costs nothing until PyTorch is needed.
"""

from importlib import import_module

_PUBLIC = {
    "norm_constant": "mxtrain.recipes.formats",
    "Recipe": "mxtrain.recipes.recipe",
    "mxnorm_cast": "mxtrain.ops.mxnorm",
    "static_tensor_scale": "mxtrain.reference.nvfp4",
    "set_rounding_step": "mxtrain.rng.rounding",
    "decompose_k_mm": "mxtrain.nn.decompose_k_router",
    "MXNorm": "mxtrain.nn.mxnorm",
    "MXNormLinear": "mxtrain.nn.mxnorm",
    "MXLinear": "mxtrain.nn.mx_linear",
    "rms_norm": "mxtrain.nn.row_norms",
    "FusedRMSNorm": "mxtrain.nn.row_norms",
    "layer_norm": "mxtrain.nn.row_norms",
    "FusedLayerNorm": "mxtrain.nn.row_norms",
    "DecomposeKRouter": "mxtrain.nn.decompose_k_router",
    "convert": "mxtrain.conversion.convert",
    "ConfigError": "mxtrain.errors",
}

__all__ = list(_PUBLIC)
__version__ = "0.1.0"


def __getattr__(name: str):
    if name not in _PUBLIC:
        raise AttributeError(f"module 'mxtrain' has no attribute {name!r}")
    return getattr(import_module(_PUBLIC[name]), name)


def __dir__():
    return sorted(set(globals()) | set(_PUBLIC))
