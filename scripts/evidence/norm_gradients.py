"""Converters for an ablation: the part of a norm's gradient that lies along x.

With xhat = rho x, MXNorm's straight-through gradient is

    dx = rho (g - c xhat mean(g xhat)),  c = 1,    and    mean(dx x) = mean(g xhat) (1 - c mean(xhat^2)).

RMSNorm has mean(xhat^2) = 1, so its gradient has no part along x. An estimate beside the true RMS leaves one. To see
whether this part is why runs with and without the estimate differ, it is changed alone:

    orthogonal_gradient    after mxnorm: c = 1 / mean(xhat^2). The estimate's forward, no part along x.
    radial_gradient        after mxnorm with estimator "exact": c = what mean(xhat^2) would be with the p = 2 estimate.
                           RMSNorm's forward, the gradient with the part along x that the estimate would leave.

orthogonal_gradient.toml and radial_gradient.toml, in this folder, train llama3_125m with them.
"""

import torch
from torchtitan.protocols.model_converter import register_model_converter

from mxtrain.errors import ConfigError
from mxtrain.formats.estimate import norm_constant
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.mxnorm import block_amax, scale_rows
from mxtrain.nn import gathered_norm, mxnorm

BLOCK, CONSTANT = MXFP8.block_size, norm_constant(2, MXFP8.block_size)


def orthogonal(xhat: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return c [T, 1] for a gradient without a part along x. Rows of zeros have no such part with any c."""
    mean_square = xhat.square().mean(-1, keepdim=True)
    return torch.where(mean_square > 0, 1 / mean_square, 0)


def radial(xhat: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """Return c [T, 1] for the part along x that an MXNorm with p = 2 and blocks of MXFP8 would have."""
    estimate = block_amax(x, BLOCK).square().mean(-1, keepdim=True) / CONSTANT**2
    square = at_least_fp32(x).square().mean(-1, keepdim=True)
    return torch.where(estimate > 0, square / estimate, 0)


def gradient_with(factor):
    """Return the function that takes the place of ``mxtrain.norms.mxnorm.norm_backward``, with c from ``factor``."""

    def norm_backward(
        g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor, mode: str, is_compiled: bool
    ) -> torch.Tensor:
        xhat = scale_rows(x, rho)
        g = at_least_fp32(g)
        projection = (g * xhat).mean(-1, keepdim=True)
        return ((g - factor(xhat, x, rho) * xhat * projection) * rho.unsqueeze(-1)).to(x.dtype)

    return norm_backward


class _Ablation:
    def __init__(self, job_config, parallel_dims):
        self.section = job_config.mxnorm

    def convert(self, model: torch.nn.Module) -> None:
        if not any(isinstance(module, mxnorm.MXNorm) for module in model.modules()):
            raise ConfigError("model.converters: an ablation of the norm's gradient comes after 'mxnorm'")
        for module in (mxnorm, gathered_norm):
            module.norm_backward = gradient_with(self.factor)

    def post_optimizer_hook(self, model) -> None:
        pass


class OrthogonalGradient(_Ablation):
    factor = staticmethod(orthogonal)


class RadialGradient(_Ablation):
    factor = staticmethod(radial)

    def convert(self, model: torch.nn.Module) -> None:
        if self.section.estimator != "exact":
            raise ConfigError(f"mxnorm.estimator = {self.section.estimator!r}: 'radial_gradient' needs 'exact'")
        super().convert(model)


register_model_converter(OrthogonalGradient, "orthogonal_gradient")
register_model_converter(RadialGradient, "radial_gradient")
