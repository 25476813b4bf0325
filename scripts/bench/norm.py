"""The fused RMSNorm, forward and backward, against its peers: time, bytes moved, share of the copy bandwidth.

    python scripts/bench/norm.py --profiler                       every section, nine shapes: kernel times
    python scripts/bench/norm.py --only backward --shapes 32768x4096 --json norm.json --plot norm.png
    python scripts/bench/norm.py --tune --profiler                also our kernels with a plan tuned per shape
    python scripts/bench/norm.py --check                          results only, no times

forward   x, weight -> y, bf16
training  the same with gradients enabled, so that rstd is kept for the backward. mxtrain always keeps it; compiled
          F.rms_norm keeps it only here
backward  dy, x, weight -> dx, dweight, bf16

Peers are PyTorch's own kernels, torch.compile in its default mode and with max-autotune, and Liger and Quack if they
are installed. "x peer" compares with the fastest peer at that shape. There are two compiled backwards: the formula, and
autograd through a compiled F.rms_norm. Bytes count the tensors named above; rstd does not count.

Every result is compared with the plain PyTorch reference before it is timed: "ok" is equal up to rounding. A peer whose
result is not is marked "differs". "of copy", "of same-size copy" and times are defined as in cast.py. The run starts
without tuned plans, and plans it tunes are discarded at its end.
"""

import importlib.util
import os
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from unittest import mock

import kernel_benchmark
import torch
import torch.nn.functional as F
from kernel_benchmark import (
    COLUMNS,
    Entry,
    Section,
    Shape,
    compile_modes,
    compiled,
    compiled_function,
    draw,
    is_rounding_apart,
    ours,
)

from mxtrain.reference.rms_norm import rms_norm, rms_norm_backward

EPS = 1e-5
DTYPE = torch.bfloat16
# The share of the copy bandwidth counts from this size on; smaller shapes fit partly in the L2 cache.
MEMORY_BOUND_BYTES = 100e6
SHAPES = (
    *((32768, 256), (32768, 768), (32768, 1024), (16384, 2048), (8192, 4096)),
    *((32768, 4096), (8192, 8192), (4096, 16384), (1152000, 384)),
)


def against_all(entries: list[Entry]) -> list[Entry]:
    """Make every entry that is not ours a peer of every entry that is."""
    peers = tuple(entry.name for entry in entries if not entry.ours)
    return [entry._replace(peers=peers) if entry.ours else entry for entry in entries]


def our_entries(name: str, run: Callable, reads: tuple, check: Callable, choose: Callable, tune: Callable | None):
    """Ours with the plan that is chosen and, if it is to be tuned, with the fastest."""

    def plan() -> str:
        p = choose().plan
        variant = "persistent" if p.persistent else "looped"
        return f"{variant} {p.rows}x{p.columns}, {p.warps} warps, {p.stages} stages, {p.programs} programs"

    entries = [ours(name, run, reads, check, ())._replace(note=plan)]
    if tune:
        # Tuned only when this entry runs: the plan then applies to every later call with this shape.
        entries.append(entries[0]._replace(name=f"{name}, tuned", make=lambda: (tune(), run)[1]))
    return entries


# Sections forward and training


def forward_entries(tune: bool, training: bool, shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.kernels.norm.rms_norm import rms_norm as kernel
    from mxtrain.kernels.norm.rms_norm_plan import choose_forward
    from mxtrain.kernels.norm.rms_norm_tuning import tune_forward

    x, weight = draw(shape, device), draw(shape[1:], device)
    reads = (x, weight)
    inputs = tuple(t.detach().requires_grad_(training) for t in reads)

    def check(y) -> bool:
        return is_rounding_apart(y.detach(), rms_norm(x, weight, EPS)[0])

    entries = [
        Entry("F.rms_norm", lambda: partial(f_rms_norm, *inputs), reads, check),
        *compiled("F.rms_norm", f_rms_norm, inputs, max_autotune, check),
    ]
    if importlib.util.find_spec("liger_kernel"):
        entries.append(Entry("Liger", lambda: liger_forward(x, weight), reads, check))
    if importlib.util.find_spec("quack"):
        entries.append(Entry("Quack", lambda: quack_forward(x, weight), reads, check))
    entries += our_entries(
        "mxtrain",
        lambda: kernel(x, weight, EPS)[0],
        reads,
        check,
        partial(choose_forward, *shape, DTYPE, x.device),
        partial(tune_forward, *shape, DTYPE) if tune else None,
    )
    return against_all(entries)


def f_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def liger_forward(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, weight, EPS, 0.0, "llama", False)[0]


def quack_forward(x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    from quack.rmsnorm import rmsnorm_fwd

    return lambda: rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)[0]


# Section backward


def backward_entries(tune: bool, shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.kernels.norm.rms_norm_backward import rms_norm_backward as kernel
    from mxtrain.kernels.norm.rms_norm_plan import choose_backward
    from mxtrain.kernels.norm.rms_norm_tuning import tune_backward

    dy, x, weight = draw(shape, device), draw(shape, device), draw(shape[1:], device)
    rstd = rms_norm(x, None, EPS)[1]
    reads = (dy, x, weight)

    def check(gradients) -> bool:
        return all(map(is_rounding_apart, gradients, rms_norm_backward(dy, x, rstd, weight)))

    entries = [
        Entry("F.rms_norm", lambda: eager_backward(dy, x, weight), reads, check),
        *(
            entry._replace(reads=reads)
            for entry in compiled("formula", rms_norm_backward, (dy, x, rstd, weight), max_autotune, check)
        ),
        *(
            Entry(f"F.rms_norm, {word}", partial(compiled_backward, dy, x, weight, mode), reads, check)
            for word, mode in compile_modes(max_autotune).items()
        ),
    ]
    if importlib.util.find_spec("liger_kernel"):
        entries.append(Entry("Liger", lambda: liger_backward(dy, x, weight), reads, check))
    if importlib.util.find_spec("quack"):
        entries.append(Entry("Quack", lambda: quack_backward(dy, x, weight, rstd), reads, check))
    entries += our_entries(
        "mxtrain",
        lambda: kernel(dy, x, rstd, weight),
        reads,
        check,
        partial(choose_backward, *shape, DTYPE, True, x.device),
        partial(tune_backward, *shape, DTYPE, True) if tune else None,
    )
    return against_all(entries)


def eager_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    """Return PyTorch's own backward kernels, called without autograd."""
    _, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, EPS)
    return lambda: torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], rstd, weight, [True, True])


def compiled_backward(
    dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, mode: str | None
) -> Callable[[], object]:
    """Return the backward graph of a compiled F.rms_norm, ready to run many times."""
    x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
    # By default the backward may overwrite saved tensors, so it could run only once.
    with torch._functorch.config.patch(donated_buffer=False):
        y = compiled_function(f_rms_norm, mode)(x, weight)
        run = partial(torch.autograd.grad, y, (x, weight), dy, retain_graph=True)
        run()
    return run


def liger_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> Callable[[], object]:
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _, _, rstd, block_size, warps, casting = rms_norm_forward(x, weight, EPS, 0.0, "llama", False)
    return lambda: rms_norm_backward(dy, x, weight, rstd, 0.0, casting, block_size, warps, False, False)[:2]


def quack_backward(dy: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, rstd: torch.Tensor) -> Callable[[], object]:
    from quack.rmsnorm import rmsnorm_bwd

    return lambda: rmsnorm_bwd(x, weight, dy, rstd)[:2]


# Running them


def sections(tune: bool) -> dict[str, Section]:
    """Return all sections; with ``tune`` they include our tuned kernels."""
    forward, training = (partial(forward_entries, tune, training) for training in (False, True))
    backward = partial(backward_entries, tune)
    return {
        "forward": Section("x, weight -> y, bf16", SHAPES, forward, fastest=True),
        "training": Section("x, weight -> y, bf16, before a backward", SHAPES, training, fastest=True),
        "backward": Section("dy, x, weight -> dx, dweight, bf16", SHAPES, backward, fastest=True),
    }


def main(argv: list[str] | None = None) -> int:
    parser = kernel_benchmark.parser(__doc__, sections(False), max_autotune=True)
    parser.add_argument("--tune", action="store_true", help="add our kernels with a plan tuned per shape")
    args = parser.parse_args(argv)
    columns = COLUMNS | {"peer": "<", "note": "<"}
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"MXTRAIN_CACHE": folder}):
        return kernel_benchmark.run("norm.py", sections(args.tune), args, columns, MEMORY_BOUND_BYTES)


if __name__ == "__main__":
    sys.exit(main())
