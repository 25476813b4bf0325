"""Compare a module with PyTorch's norms: results and gradients of random rows, in training and in evaluation."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn as nn

from mxtrain.conversion.structural_copy import structural_copy, without_global_hooks
from mxtrain.reference import layer_norm, rms_norm

# Magnitudes of rows. eps dominates the small ones, which tells it apart from its neighbours; clamps change the large
# ones. The cube of the inverse RMS, which autograd computes in fp32, is finite and not 0.
_ROWS = (1.0, 1e2, 1e-2, 1e-4, 1e5, 1e-6, 1e8, 1e-10)
# Magnitudes of the parameters and of the gradient of y. Clamps change large results and gradients.
_SCALES = (1.0, 1e4)
SAME_RESULTS = "has the results of"
"""Part of the words for a module whose gradients alone differ from a norm's"""


def _rms_norm(x, dy, eps, weight):
    y, rstd, _ = rms_norm.rms_norm(x, weight, eps)
    return rstd, y, *rms_norm.rms_norm_backward(dy, x, rstd, weight)


def _layer_norm(x, dy, eps, weight, bias=None):
    y, mean, rstd, _ = layer_norm.layer_norm(x, weight, bias, eps)
    return rstd, y, *layer_norm.layer_norm_backward(dy, x, mean, rstd, weight, None, x.dtype, x.dtype)


# The norm, and the allowed error of y as a share of the largest |y| in the row: digits may cancel where LayerNorm
# subtracts the mean and adds the bias.
_NORMS = {"RMSNorm": (_rms_norm, 0.0), "LayerNorm": (_layer_norm, 1e-5)}


class _Run(NamedTuple):
    """What a module was given, and its results: y, dx and the gradient of every vector, None for one that is absent."""

    scale: float
    x: torch.Tensor
    dy: torch.Tensor
    vectors: Mapping[str, torch.Tensor]
    results: tuple[torch.Tensor | None, ...]


def eps_of(module: nn.Module, name: str) -> float | str:
    """The float among the attributes of ``module`` with which it computes PyTorch's norm ``name``; or the difference.

    The rows form a matrix and then a batch of sequences: a norm of another dimension gives other results or fails,
    because that dimension has another length. A copy of the module runs; the module's own parameters may be on the meta
    device. A module that returns another dtype than it gets has no eps.

    Args:
        module: has a weight [D], perhaps a bias [D], and no other parameters.
        name: "RMSNorm" or "LayerNorm".

    Returns:
        the eps; or what the module does not do, in words that follow "is a norm that".
    """
    nearest = 0, f"does not compute what nn.{name} does with an attribute as eps, or changes the dtype"
    try:
        with torch.inference_mode(False), without_global_hooks(), torch.random.fork_rng(devices=()):
            runs = _runs(module)
    except Exception:  # the module is no function of rows and these vectors
        return nearest[1]
    # The largest first: these rows cannot tell a tiny eps from 0, with which a row of zeros becomes NaN.
    for eps in sorted({value for value in vars(module).values() if isinstance(value, float)}, reverse=True):
        agreeing, difference = 0, "" if runs else nearest[1]
        for run in runs:
            rows, difference = _difference(run, eps, name)
            agreeing += rows
            if difference:
                break
        if not difference:
            return eps
        nearest = max(nearest, (agreeing, difference))
    return nearest[1]


def _runs(module: nn.Module) -> list[_Run]:
    """Run a copy on random operands. Empty if it does not keep the dtype and the shape of x."""
    parameters, generator = dict(module.named_parameters()), torch.Generator("cpu").manual_seed(0)
    dim = parameters["weight"].numel()
    in_fp32 = {"dtype": torch.float32, "device": "cpu"}  # whatever the defaults are
    x = torch.randn(len(_ROWS), dim, generator=generator, **in_fp32) * torch.tensor(_ROWS, **in_fp32).unsqueeze(1)
    dy = torch.randn(x.shape, generator=generator, **in_fp32)
    names = [name for name in ("weight", "bias") if name in parameters]
    vectors = {name: torch.randn(dim, generator=generator, **in_fp32) for name in names}
    copy, runs = structural_copy(module), []
    if not _returns_bf16(copy, vectors, x):
        return []
    for scale, shape in zip(_SCALES, (x.shape, (-1, 4 if dim == 2 else 2, dim))):
        for training in (True, False):
            rows = x.view(shape).requires_grad_()
            scaled = {name: (scale * vector).requires_grad_() for name, vector in vectors.items()}
            with torch.enable_grad():
                y = torch.func.functional_call(copy.train(training), scaled, (rows,))
            if not isinstance(y, torch.Tensor) or y.shape != rows.shape:
                return []
            given = (rows, *scaled.values())
            gradients = (None,) * len(given)
            if y.requires_grad:
                dy_of_y = (scale * dy).view(shape).to(y.dtype)
                gradients = torch.autograd.grad(y, given, dy_of_y, allow_unused=True)
            runs.append(_Run(scale, x, scale * dy, scaled, (y.detach(), *gradients)))
    return runs


def _difference(run: _Run, eps: float, name: str) -> tuple[int, str]:
    """The number of rows in which a run agrees with a norm, and the first difference in words, "" for none."""
    norm, noise = _NORMS[name]
    vectors = {vector: value.detach().double() for vector, value in run.vectors.items()}
    rstd, y, *gradients = norm(run.x.double(), run.dy.double(), eps, **vectors)
    got_y, *got_gradients = run.results
    agrees = _agrees(got_y, y, noise * y.abs()).view(len(_ROWS), -1).all(1)
    if not agrees.all():
        row = _ROWS[agrees.int().argmin()]  # the most ordinary one
        where = ", or changes the dtype"
        if (row, run.scale) != (1.0, 1.0):
            where = f" in rows of about {row:g}" + (f" with a weight of about {run.scale:g}" if run.scale > 1 else "")
        return int(agrees.sum()), f"does not compute what nn.{name} does with an attribute as eps{where}"
    # dx is a difference of terms of this magnitude, and may be 0.
    terms = run.dy * vectors["weight"] * rstd.unsqueeze(1)
    names = ("x", "its weight", "its bias")
    for of, got, want, magnitude in zip(names, got_gradients, gradients, (terms, *gradients[1:])):
        if got is None or not _agrees(got, want, 1e-5 * magnitude.abs()).all():
            return len(_ROWS), f"{SAME_RESULTS} nn.{name} and {'no' if got is None else 'another'} gradient of {of}"
    return len(_ROWS), ""


def _agrees(got: torch.Tensor, want: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    limit = 1e-4 * want.abs() + noise.amax(-1, keepdim=True)
    return (got.double().reshape(want.shape) - want).abs() <= limit


def _returns_bf16(norm: nn.Module, vectors: Mapping[str, torch.Tensor], rows: torch.Tensor) -> bool:
    """Whether a norm keeps the dtype of bf16 rows, with parameters in bf16 or, as some norms need, in fp32."""
    for dtype in (torch.bfloat16, torch.float32):
        parameters = {name: vector.to(dtype) for name, vector in vectors.items()}
        try:
            if torch.func.functional_call(norm, parameters, (rows.bfloat16(),)).dtype == torch.bfloat16:
                return True
        except RuntimeError:  # mixed dtypes
            continue
    return False
