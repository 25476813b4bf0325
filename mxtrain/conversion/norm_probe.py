"""Compare a module with PyTorch's norms: results and gradients of random rows, in training and in evaluation."""

from contextlib import suppress

import torch
import torch.nn as nn
import torch.nn.functional as F

from mxtrain.conversion.structural_copy import structural_copy, without_global_hooks

# Magnitudes of rows. eps dominates the small ones, which tells it apart from its neighbours; clamps change the large
# ones. The cube of the inverse RMS, which autograd computes in fp32, is finite and not 0.
_ROWS = (1.0, 1e2, 1e-2, 1e-4, 1e5, 1e-6, 1e8, 1e-10)
# Magnitudes of the parameters and of the gradient of y. Clamps change large results and gradients.
_SCALES = (1.0, 1e4)
SAME_RESULTS = "has the results of"  # so begin the words for a module whose gradients alone differ


@torch.inference_mode(False)
@torch.enable_grad()
def eps_of(module: nn.Module, name: str) -> float | str:
    """The float among the attributes of ``module`` with which it computes PyTorch's norm; or how it differs, in words.

    The rows form a matrix and then a batch of sequences: a norm of another dimension gives other results or fails,
    because that dimension has another length. A copy of the module runs; the module's own parameters may be on the meta
    device. It has a weight [D] and perhaps a bias [D]. A module that changes the dtype of rows has no eps.
    """
    nearest = 0, 0, f"does not compute what nn.{name} does with an attribute as eps, or changes the dtype"
    try:
        with without_global_hooks(), torch.random.fork_rng(devices=()):
            runs = _runs(module)
    except Exception:  # the module is no function of rows and these vectors
        return nearest[-1]
    # The largest first: these rows cannot tell a tiny eps from 0, with which a row of zeros becomes NaN.
    for eps in sorted({value for value in vars(module).values() if isinstance(value, float)}, reverse=True):
        found = [(place, *wrong) for place, run in enumerate(runs) if (wrong := _difference(*run, name, eps))]
        if not found:
            return eps
        nearest = max(nearest, found[0])
    return nearest[-1]


def _runs(module: nn.Module) -> list[tuple]:
    """Run a copy of the module, in training and in evaluation -> (scale, x, vectors, dy, results) of every run."""
    parameters, generator = dict(module.named_parameters()), torch.Generator("cpu").manual_seed(0)
    dim = parameters["weight"].numel()

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float32, device="cpu")  # whatever the defaults are

    x, dy = draw(2, len(_ROWS), dim)
    x *= x.new_tensor(_ROWS).unsqueeze(1)
    vectors = {name: draw(dim) for name in ("weight", "bias") if name in parameters}
    copy, runs = structural_copy(module), []

    def norm(rows, **vectors):
        y = torch.func.functional_call(copy, vectors, (rows,))
        if y.shape != rows.shape:
            raise TypeError("a norm keeps the shape")
        return y

    dtypes = set()
    for dtype in (torch.bfloat16, torch.float32):  # of the parameters: some norms need fp32
        with suppress(RuntimeError):  # mixed dtypes
            dtypes.add(norm(x.bfloat16(), **{name: vector.to(dtype) for name, vector in vectors.items()}).dtype)
    if torch.bfloat16 not in dtypes:
        raise TypeError("a norm keeps the dtype")
    for scale, shape in zip(_SCALES, (x.shape, (-1, 4 if dim == 2 else 2, dim))):
        given = x.view(shape), {name: scale * vector for name, vector in vectors.items()}, scale * dy.view(shape)
        for training in (True, False):
            copy.train(training)
            runs.append((scale, *given, _results(norm, *given)))
    return runs


def _results(norm, x, vectors, dy) -> tuple:
    """y, and the gradients of x and of every vector, None for one that is absent."""
    x, *leaves = (tensor.detach().requires_grad_() for tensor in (x, *vectors.values()))
    y = norm(x, **dict(zip(vectors, leaves)))
    if not y.requires_grad:
        return y, None, *(None for _ in leaves)
    return y.detach(), *torch.autograd.grad(y, (x, *leaves), dy.to(y.dtype), allow_unused=True)


def _difference(scale, x, vectors, dy, results, name: str, eps: float) -> tuple[int, str] | None:
    """The number of rows whose results agree with a norm's, and what differs first, in words; None for nothing."""
    norm = F.rms_norm if name == "RMSNorm" else F.layer_norm
    x, dy, vectors = x.double(), dy.double(), {vector: value.double() for vector, value in vectors.items()}
    wanted = _results(lambda x, **vectors: norm(x, x.shape[-1:], eps=eps, **vectors), x, vectors, dy)
    # Digits cancel where means are subtracted and a bias is added. dx is a difference of terms of this magnitude.
    terms = dy * vectors["weight"] * (x.var(-1, correction=0, keepdim=True) + eps).rsqrt()
    magnitudes = wanted[0], terms, *wanted[2:]
    for of, got, want, magnitude in zip(("y", "x", "its weight", "its bias"), results, wanted, magnitudes):
        limit = 1e-4 * want.abs() + 1e-5 * magnitude.abs().amax(-1, keepdim=True)
        if got is not None and (agrees := ((got.double() - want).abs() <= limit).view(-1, x.shape[-1]).all(1)).all():
            continue
        if of != "y":
            return len(_ROWS), f"{SAME_RESULTS} nn.{name} and {'no' if got is None else 'another'} gradient of {of}"
        row = _ROWS[agrees.int().argmin()]  # the most ordinary one
        where = f" in rows of about {row:g}" + f" with a weight of about {scale:g}" * (scale > 1)
        where = ", or changes the dtype" if row == scale == 1 else where
        return int(agrees.sum()), f"does not compute what nn.{name} does with an attribute as eps{where}"
    return None
