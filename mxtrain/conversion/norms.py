"""Recognise RMSNorm, PyTorch's own or anybody's, by what it computes."""

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.nn.fused_rms_norm import FusedRMSNorm

# Rows of these magnitudes tell any eps apart from its neighbours: with eps = 1e-6 the smallest are ruled by it.
_MAGNITUDES = (1e-4, 1e-2, 1.0, 100.0)


def looks_like_rms_norm(module: nn.Module) -> bool:
    """Whether a module calls itself an RMSNorm."""
    return "rmsnorm" in type(module).__name__.lower()


def as_rms_norm(module: nn.Module) -> nn.RMSNorm | None:
    """The ``nn.RMSNorm`` that ``module`` is or computes, sharing its weight; None if it is or computes none.

    Many models bring an RMSNorm class of their own, with a 1-D ``weight`` and an eps under some name. Such a module is
    run on random rows with a random weight; it is an RMSNorm if its results are those of ``F.rms_norm`` with one of
    the numbers it holds for eps. (One that scales by 1 + weight, say, is not.) Its own weight is not touched and may
    be on the meta device.
    """
    if type(module) in (nn.RMSNorm, FusedRMSNorm):
        return module
    parameters, buffers = dict(module.named_parameters()), dict(module.named_buffers())
    if not looks_like_rms_norm(module) or parameters.keys() != {"weight"} or buffers or parameters["weight"].ndim != 1:
        return None
    dim = parameters["weight"].shape[0]
    generator = torch.Generator("cpu").manual_seed(0)
    draw = lambda *shape: torch.randn(*shape, generator=generator, device="cpu")  # noqa: E731
    x, weight = draw(len(_MAGNITUDES), dim) * torch.tensor(_MAGNITUDES, device="cpu").unsqueeze(1), draw(dim)
    try:
        with torch.no_grad():
            result = torch.func.functional_call(module, {"weight": weight}, (x,))
    except Exception:  # whatever it needs, it is no function of a row and a weight
        return None
    for eps in {value for value in vars(module).values() if isinstance(value, float)}:
        expected = F.rms_norm(x, (dim,), weight, eps)
        if isinstance(result, torch.Tensor) and result.shape == x.shape:
            if torch.allclose(result.float(), expected, rtol=1e-4, atol=0):
                norm = nn.RMSNorm(dim, eps, device="meta")
                norm.weight = module.weight
                return norm.train(module.training)
    return None
