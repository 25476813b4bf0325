"""The norms. Each has a file with its function, its module and the class that the module replaces."""

from mxtrain.norms.layer_norm import FusedLayerNorm
from mxtrain.norms.rms_norm import FusedRMSNorm

# PyTorch's class -> the norm that replaces it.
FUSED_NORMS = {norm.replaces: norm for norm in (FusedRMSNorm, FusedLayerNorm)}
