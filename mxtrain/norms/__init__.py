"""The norms: a file each, with its function, its module and what it replaces."""

from mxtrain.norms.layer_norm import FusedLayerNorm
from mxtrain.norms.rms_norm import FusedRMSNorm

# By the class of PyTorch that each replaces.
FUSED_NORMS = {norm.replaces: norm for norm in (FusedRMSNorm, FusedLayerNorm)}
