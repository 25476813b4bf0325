"""SwiGLU fused with its MXFP8 casts against compiled SwiGLU followed by casts.

    python scripts/bench/swiglu.py
    python scripts/bench/swiglu.py --only backward --shapes 16384x8192 --profiler
    python scripts/bench/swiglu.py --only tiles --profiler          other tiles and numbers of warps
    python scripts/bench/swiglu.py --check                          results only, no times

Shapes are [tokens, hidden features]. "step" is all work of a training step on h, dgate and dup, forward and backward,
except the matrix products. Casts must have the bits of the reference's cast of the SwiGLU that the kernels compute, and
this SwiGLU must be within two roundings of PyTorch's. Columns and times are those of ``cast.py``.
"""

import sys
from collections.abc import Callable
from functools import partial
from unittest import mock

import kernel_benchmark
import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from cast import RECIPE, is_cast
from kernel_benchmark import Entry, Section, Shape, compiled_function, draw, ours

from mxtrain.formats import swiglu as reference
from mxtrain.formats.cast_kernels import casts_of
from mxtrain.formats.mx import swiglu_cast as kernels
from mxtrain.formats.mx.cast import cast
from mxtrain.formats.mx.swiglu_cast import sigmoid, swiglu, swiglu_backward_cast, swiglu_cast, swiglu_dgate

SHAPES: tuple[Shape, ...] = ((65536, 2048), (16384, 8192), (16384, 14336))
TILES = (
    *((32, 32, 1), (32, 64, 1), (32, 64, 2), (32, 64, 4), (32, 128, 1), (32, 128, 2), (32, 128, 4), (32, 128, 8)),
    *((32, 256, 4), (32, 256, 8), (64, 64, 2), (64, 64, 4), (64, 128, 8)),
)
FORMS = ("image", "blocked")
_SIZE = 1024


@triton.jit
def _formula_kernel(dh_ptr, gate_ptr, up_ptr, h_ptr, dup_ptr, dgate_ptr, count, SIZE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    gate = tl.load(gate_ptr + at, mask=at < count).to(tl.float32)
    up = tl.load(up_ptr + at, mask=at < count).to(tl.float32)
    dh = tl.load(dh_ptr + at, mask=at < count).to(tl.float32)
    s = sigmoid(gate)
    silu = gate * s
    dtype: tl.constexpr = gate_ptr.dtype.element_ty
    tl.store(h_ptr + at, swiglu(silu, up, dtype), mask=at < count)
    tl.store(dup_ptr + at, swiglu(silu, dh, dtype), mask=at < count)
    tl.store(dgate_ptr + at, swiglu_dgate(silu, s, up, dh, dtype), mask=at < count)


class Inputs:
    """dh, gate and up of a shape, and the values that the kernels compute from them before the casts."""

    def __init__(self, shape: Shape, device: str):
        self.dh, self.gate, self.up = self.all = tuple(draw(shape, device) for _ in range(3))
        self._exact: tuple | None = None

    def exact(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """h, dgate and dup as the kernels round them. Raises AssertionError unless they are near the reference's."""
        if self._exact is None:
            h, dup, dgate = (torch.empty_like(self.gate, dtype=torch.float32) for _ in range(3))
            grid = (triton.cdiv(h.numel(), _SIZE),)
            _formula_kernel[grid](*self.all, h, dup, dgate, h.numel(), SIZE=_SIZE)
            wide = [t.float() for t in self.all]
            for got, want in zip((h, dgate, dup), (reference.swiglu(*wide[1:]), *reference.swiglu_backward(*wide))):
                near = (got - want).abs() <= 2.0**-7 * want.abs() + 1e-5
                if not near.all():
                    raise AssertionError(f"SwiGLU is off by up to {(got - want).abs().max().item()}")
            self._exact = tuple(t.to(self.gate.dtype) for t in (h, dgate, dup))
        return self._exact

    def are_forward(self, results, form: str) -> bool:
        return is_cast(results[0], self.exact()[0], 1, form)

    def are_both(self, results, form: str) -> bool:
        return self.are_forward(results[:1], form) and self.are_backward(results[1:], form)

    def are_backward(self, results, form: str) -> bool:
        h, dgate, dup = self.exact()
        wanted = ((dgate, 1), (dgate, 0), (dup, 1), (dup, 0), (h, 0))
        return all(is_cast(result, x, dim, form) for result, (x, dim) in zip(results, wanted, strict=True))


# mxtrain's kernels: every result is a list of (data, scales)


def forward(x: Inputs, form: str) -> list:
    return casts_of(swiglu_cast(x.gate, x.up, True, False, "e4m3", RECIPE.scale_rounding, form), form)


def backward(x: Inputs, form: str) -> list:
    results = swiglu_backward_cast(
        x.dh, x.gate, x.up, True, True, True, False, "e4m3", "e4m3", RECIPE.scale_rounding, form
    )
    return casts_of(results, form)


def both(x: Inputs, form: str) -> list:
    return forward(x, form) + backward(x, form)


# The peer: Inductor's SwiGLU and its gradients, and casts that read them


def unfused_forward(gate, up, form: str) -> list:
    return [*cast(F.silu(gate) * up, RECIPE, (1,), form).values()]


def unfused_backward(dh, gate, up, form: str) -> list:
    """dgate and dup, each with both casts, and h again for its cast along tokens."""
    dgate, dup = reference.swiglu_backward(dh, gate, up)
    h = F.silu(gate) * up
    return [
        *cast(dgate, RECIPE, (1, 0), form).values(),
        *cast(dup, RECIPE, (1, 0), form).values(),
        *cast(h, RECIPE, (0,), form).values(),
    ]


def unfused_step(dh, gate, up, form: str) -> list:
    """As mxtrain trains without the fusion: the forward casts h twice, and keeps its cast along tokens."""
    h = F.silu(gate) * up
    rows, columns = cast(h, RECIPE, (1,), form)[1], cast(h, RECIPE, (0,), form)[0]
    dgate, dup = reference.swiglu_backward(dh, gate, up)
    return [rows, *cast(dgate, RECIPE, (1, 0), form).values(), *cast(dup, RECIPE, (1, 0), form).values(), columns]


def peer(function: Callable, form: str, *args: torch.Tensor) -> Entry:
    def make():
        fast = compiled_function(function, None)
        return lambda: fast(*args, form)

    return Entry(f"compiled SwiGLU, then casts, {form}", make, args)


def forward_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    x, entries = Inputs(shape, device), []
    for form in FORMS:
        other, check = peer(unfused_forward, form, x.gate, x.up), partial(x.are_forward, form=form)
        entries += [
            other,
            ours(f"swiglu_cast {form}", partial(forward, x, form), (x.gate, x.up), check, (other.name,)),
        ]
    return entries


def backward_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    x, entries = Inputs(shape, device), []
    for form in FORMS:
        other, check = peer(unfused_backward, form, *x.all), partial(x.are_backward, form=form)
        entries += [
            other,
            ours(f"swiglu_backward_cast {form}", partial(backward, x, form), x.all, check, (other.name,)),
        ]
    return entries


def step_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    x, entries = Inputs(shape, device), []
    for form in FORMS:
        other, check = peer(unfused_step, form, *x.all), partial(x.are_both, form=form)
        reads = (*x.all, x.gate, x.up)  # both kernels read gate and up
        entries += [other, ours(f"both kernels {form}", partial(both, x, form), reads, check, (other.name,))]
    return entries


def tile_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    x, entries = Inputs(shape, device), []
    for tile in TILES:
        name = "{}x{}, {} warps".format(*tile)
        for function, reads, check in ((forward, (x.gate, x.up), x.are_forward), (backward, x.all, x.are_backward)):
            run = partial(with_tile, tile, function, x)
            entries.append(ours(f"{function.__name__} {name}", run, reads, partial(check, form="image"), ()))
    return entries


def with_tile(tile: tuple[int, int, int], function: Callable, x: Inputs) -> list:
    with mock.patch.object(kernels, "_tile", lambda *_: tile):
        return function(x, "image")


SECTIONS = {
    "forward": Section("cast of silu(gate) * up along rows, bf16", SHAPES, forward_entries),
    "backward": Section("casts of dgate and dup both ways, and of h along tokens", SHAPES, backward_entries),
    "step": Section("forward and backward", SHAPES, step_entries),
    "tiles": Section("rows x columns and warps of a program, images", SHAPES, tile_entries),
}


def main(argv: list[str] | None = None) -> int:
    args = kernel_benchmark.parser(__doc__, SECTIONS).parse_args(argv)
    return kernel_benchmark.run("swiglu.py", SECTIONS, args)


if __name__ == "__main__":
    sys.exit(main())
