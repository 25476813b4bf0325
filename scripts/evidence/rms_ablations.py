"""Converters for an ablation: MXNorm divides by a part of its estimate of the RMS, or by more.

In a row with few large elements the estimate is above the true RMS, with p = 2 and blocks of 32 up to 2.4 times: MXNorm
makes such rows smaller than RMSNorm does. In a row of even magnitudes it is below, down to 0.42 times: MXNorm makes the
row larger. To see what makes runs with the estimate differ, a part is left out or added. After mxnorm:

    damped_rms           divides by the larger of both. No row is larger than after RMSNorm.
    amplified_rms        divides by the smaller of both. No row is smaller than after RMSNorm.
    evenly_damped_rms    divides by the true RMS, times the mean over all rows of the estimate's ratio to it. Rows are
                         as small on average as after MXNorm, but keep their sizes relative to each other.
    enlarged_rms         divides by 1.45 times the estimate, about post_round's multiple of the true RMS of Gaussian
                         rows. No gain can undo that, because it is part of the norm.
    doubled_rms          divides by twice the estimate.
    rounded_rms          divides by post_round's estimate over 1.45: rows are about as large as with p = 2, but the
                         estimate follows their maxima in steps of a power of two. Needs estimator = "post_round".

Everything else is MXNorm's: eps, the casts, and the straight-through gradient, with the inverse of this RMS as rho.
The files of these names in this folder train llama3_125m with them.
"""

import torch
from torchtitan.protocols.model_converter import register_model_converter

from mxtrain.errors import ConfigError
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.matrices import CastSpec, Operand
from mxtrain.formats.mx.ops import MXKernelOps
from mxtrain.formats.mxnorm import mean_square
from mxtrain.formats.recipe import Recipe
from mxtrain.nn import mxnorm
from mxtrain.settings.mxnorm_section import diagnostics_every


def evenly_damped(true: torch.Tensor, estimate: torch.Tensor) -> torch.Tensor:
    """The squares of the true RMS, [T], times one number. Rows of zeros do not count."""
    return true * torch.where(true > 0, estimate / true, 1).sqrt().mean().square()


def normalize_with(choose):
    """Return the function that takes the place of ``FormatOps.normalize``.

    Args:
        choose: gets the squares of the true RMS and of the estimate, fp64 [T], and returns what the norm takes.
    """

    def normalize(
        ops, x: torch.Tensor, estimate: RMSEstimate, recipe: Recipe, mode: str
    ) -> tuple[Operand, torch.Tensor]:
        square = choose(x.double().square().mean(-1), mean_square(x, estimate, recipe))
        rho = (1 / torch.sqrt(square + estimate.eps)).to(torch.promote_types(x.dtype, torch.float32))
        return ops.cast([x], recipe, mode, (1,), CastSpec(row_factor=rho))[1], rho

    return normalize


ENLARGED = 1.45


def times(factor: float):
    """The estimate times a factor; of its square, [T]."""
    return lambda true, estimate: factor**2 * estimate


class _Ablation:
    estimator = "pre_round"

    def __init__(self, job_config, parallel_dims):
        section = job_config.mxnorm
        # Others would leave the ablation out or change it without a word: shards are normalized elsewhere, and
        # diagnostics measure the estimate that the norm names.
        for setting, value, needed in (
            ("mxnorm.estimator", section.estimator, self.estimator),
            ("mxnorm.diagnostics.every", diagnostics_every(section), 0),
            ("parallelism.tensor_parallel_degree", job_config.parallelism.tensor_parallel_degree, 1),
        ):
            if value != needed:
                raise ConfigError(f"{setting} = {value!r}: an ablation of the norm's forward needs {needed!r}")

    def convert(self, model: torch.nn.Module) -> None:
        norms = [module for module in model.modules() if isinstance(module, mxnorm.MXNorm)]
        if not norms:
            raise ConfigError("model.converters: an ablation of the norm's forward comes after 'mxnorm'")
        if nvfp4 := [norm.recipe.fprop.name for norm in norms if norm.recipe.fprop.tensor_scaled]:
            raise ConfigError(f"mxnorm.recipe = {nvfp4[0]!r}: an ablation of the norm's forward has no NVFP4")
        MXKernelOps.normalize = normalize_with(self.choose)

    def post_optimizer_hook(self, model) -> None:
        pass


class DampedRMS(_Ablation):
    choose = staticmethod(torch.maximum)


class AmplifiedRMS(_Ablation):
    choose = staticmethod(torch.minimum)


class EvenlyDampedRMS(_Ablation):
    choose = staticmethod(evenly_damped)


class EnlargedRMS(_Ablation):
    choose = staticmethod(times(ENLARGED))


class DoubledRMS(_Ablation):
    choose = staticmethod(times(2))


class RoundedRMS(_Ablation):
    estimator = "post_round"
    choose = staticmethod(times(1 / ENLARGED))


register_model_converter(DampedRMS, "damped_rms")
register_model_converter(AmplifiedRMS, "amplified_rms")
register_model_converter(EvenlyDampedRMS, "evenly_damped_rms")
register_model_converter(EnlargedRMS, "enlarged_rms")
register_model_converter(DoubledRMS, "doubled_rms")
register_model_converter(RoundedRMS, "rounded_rms")
