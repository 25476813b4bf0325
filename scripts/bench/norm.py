"""The fused RMSNorm or LayerNorm, forward and backward, against peers: time, bytes moved, share of the copy bandwidth.

    python scripts/bench/norm.py --profiler                       every section, nine shapes: kernel times
    python scripts/bench/norm.py --norm layer --only backward --profiler     LayerNorm
    python scripts/bench/norm.py --only backward --shapes 32768x4096 --json norm.json --plot norm.png
    python scripts/bench/norm.py --check                          results only, no times

forward   x, weight -> y, bf16; LayerNorm reads a bias, too
training  the same with gradients enabled, so that rstd is kept for the backward. mxtrain always keeps it; compiled
          F.rms_norm keeps it only here
backward  dy, x, weight -> dx, dweight, bf16, and dbias for LayerNorm

Peers are PyTorch's own kernels, torch.compile in its default mode and with max-autotune, and, where installed, Liger
(its CuTeDSL kernels need nvidia-cutlass-dsl), Quack (no backward of LayerNorm) and cuDNN's frontend. "x peer" compares
with the fastest peer at that shape. RMSNorm has two compiled backwards: the formula, and autograd through a compiled
F.rms_norm. Bytes count the tensors named above; rstd and the mean do not count.

Every result is compared with the plain PyTorch reference in fp64 before it is timed: "ok" is equal up to rounding. A
peer whose result is not is marked "differs". "of copy", "of same-size copy" and times are defined as in cast.py.
"""

import functools
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial

import kernel_benchmark
import torch
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
from norm_kinds import KINDS, RMS, Kind, Peer

from mxtrain.launch.launch import sm_count
from mxtrain.norms.kernels import Plan, backward_plan, forward_plan

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


def installed(kind: Kind) -> dict[str, Peer]:
    """Return the peers whose packages are installed, by name."""
    return {name: peer for name, peer in kind.peers.items() if all(map(importlib.util.find_spec, peer.packages))}


def our_entry(run: Callable, reads: tuple, check: Callable, p: Plan) -> Entry:
    variant = "persistent" if p.persistent else "looped"
    note = f"{variant} {p.rows}x{p.columns}, {p.warps} warps, {p.stages} stages, {p.programs} programs"
    return ours("mxtrain", run, reads, check, ())._replace(note=lambda: note)


# Sections forward and training


def forward_entries(kind: Kind, training: bool, shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    reads = (draw(shape, device), *(draw(shape[1:], device) for _ in kind.vectors))
    inputs = tuple(t.detach().requires_grad_(training) for t in reads)

    @functools.cache
    def want() -> torch.Tensor:
        return kind.reference(*(t.double() for t in reads))[0].to(DTYPE)

    def check(y) -> bool:
        return is_rounding_apart(y.detach(), want())

    entries = [
        Entry(kind.title, lambda: partial(kind.function, *inputs), reads, check),
        *compiled(kind.title, kind.function, inputs, max_autotune, check),
    ]
    entries += [Entry(name, partial(peer.forward, *reads), reads, check) for name, peer in installed(kind).items()]
    plan = forward_plan(*shape, kind.centered, sm_count(reads[0].device))
    entries.append(our_entry(lambda: kind.kernel(*reads), reads, check, plan))
    return against_all(entries)


# Section backward


def backward_entries(kind: Kind, shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    dy, x, *vectors = (draw(shape, device), draw(shape, device), *(draw(shape[1:], device) for _ in kind.vectors))
    _, *numbers = kind.reference(x.double(), *(vector.double() for vector in vectors))
    numbers, weight = [each.float() for each in numbers], vectors[0]
    reads = (dy, x, weight)

    @functools.cache
    def wants() -> list[torch.Tensor]:
        wide = (each.double() for each in (dy, x, *numbers, weight))
        return [gradient.to(DTYPE) for gradient in kind.reference_backward(*wide)]

    def check(gradients) -> bool:
        return all(is_rounding_apart(gradient, want) for gradient, want in zip(gradients, wants(), strict=True))

    args = (dy, x, *numbers, weight)
    entries = [
        Entry(kind.title, lambda: kind.eager_backward(dy, x, *vectors), reads, check),
        *(
            entry._replace(reads=reads)
            for entry in compiled("formula", kind.reference_backward, args, max_autotune, check)
            if kind.formula
        ),
        *(
            Entry(f"{kind.title}, {word}", partial(compiled_backward, kind, dy, x, vectors, mode), reads, check)
            for word, mode in compile_modes(max_autotune).items()
        ),
    ]
    entries += [
        Entry(name, partial(peer.backward, dy, x, numbers, *vectors), reads, check)
        for name, peer in installed(kind).items()
        if peer.backward
    ]
    plan = backward_plan(*shape, kind.centered, sm_count(x.device))
    entries.append(our_entry(lambda: kind.backward_kernel(*args), reads, check, plan))
    return against_all(entries)


def compiled_backward(
    kind: Kind, dy: torch.Tensor, x: torch.Tensor, vectors: Sequence[torch.Tensor], mode: str | None
) -> Callable[[], object]:
    """Return the backward graph of PyTorch's function, compiled, ready to run many times."""
    inputs = tuple(t.detach().requires_grad_() for t in (x, *vectors))
    # By default the backward may overwrite saved tensors, so it could run only once.
    with torch._functorch.config.patch(donated_buffer=False):
        y = compiled_function(kind.function, mode)(*inputs)
        run = partial(torch.autograd.grad, y, inputs, dy, retain_graph=True)
        run()
    return run


# Running them


def sections(kind: Kind = RMS) -> dict[str, Section]:
    """Return all sections for a kind of norm."""
    forward, training = (partial(forward_entries, kind, training) for training in (False, True))
    backward = partial(backward_entries, kind)
    given, gradients = (", ".join(f"{prefix}{name}" for name in kind.vectors) for prefix in ("", "d"))
    return {
        "forward": Section(f"x, {given} -> y, bf16", SHAPES, forward, fastest=True),
        "training": Section(f"x, {given} -> y, bf16, before a backward", SHAPES, training, fastest=True),
        "backward": Section(f"dy, x, weight -> dx, {gradients}, bf16", SHAPES, backward, fastest=True),
    }


def main(argv: list[str] | None = None) -> int:
    parser = kernel_benchmark.parser(__doc__, sections(), max_autotune=True)
    parser.add_argument("--norm", choices=KINDS, default="rms", help="RMSNorm (the default) or LayerNorm")
    args = parser.parse_args(argv)
    columns = COLUMNS | {"peer": "<", "note": "<"}
    return kernel_benchmark.run("norm.py", sections(KINDS[args.norm]), args, columns, MEMORY_BOUND_BYTES)


if __name__ == "__main__":
    sys.exit(main())
