"""The NVFP4 kernels against PyTorch and torchao: time, bytes moved, share of the copy bandwidth.

    python scripts/bench/nvfp4.py                                 every section
    python scripts/bench/nvfp4.py --only norm --max-autotune --profiler --json nvfp4.json --plot nvfp4.png
    python scripts/bench/nvfp4.py --only gradient --shapes 16384x2048
    python scripts/bench/nvfp4.py --check                         results only, no times

norm      MXNorm and its cast. The tensor scale is known in advance. The peer, RMSNorm and torchao's cast, first needs
          the largest magnitude of the norm's output. Goal for codes: a geometric mean of 1.9 times the peer's speed,
          and 0.85 of the copy bandwidth from 50 MB up ("geomean" and "min of copy" in the summary).
gradient  an output gradient, rounded stochastically: for dgrad, and for wgrad after a transform along the tokens.
input     x * rho for wgrad, transformed along the tokens, rounded to nearest.
weight    W and W diag(gain) in tiles of 16 x 16, for fprop and dgrad.

Outside the norm a tensor scale is a power of two chosen from the largest magnitude, which takes a pass of its own:
"amax" is this pass with the scale, "cast" the next one, and "amax + cast" both together. "amax +
cast" and its peers count the bytes of both passes, so the matrix counts twice. Operands of a few bytes (signs, keys of
random bits) do not count. Peers that draw random bits in plain PyTorch also run in eager mode, because 64-bit integers
are slow in one compiled kernel; the gradient is compared with its fastest peer.

Every result is compared bit for bit with the plain PyTorch reference on the same input before it is timed (rho: within
2 ulp; the cast: given the kernel's own rho). A peer with other bits is marked "differs"; compiled, some round less
often. torchao's training kernels draw other random bits and are not compared.

Bytes, shares of the copy bandwidth and times are defined as in cast.py. Time "amax + cast" with --profiler: for small
shapes the host launches more slowly than the kernels run, and CUDA events include that wait.
"""

import sys
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import NamedTuple

import cast_cases as cases
import kernel_benchmark
import torch
import torch.nn.functional as F
from cast_cases import EPS, random_rho
from kernel_benchmark import Entry, NotRun, Section, Shape, compiled, draw, ours, same_bits, tensors

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hadamard import hadamard, pad, unpack_signs
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mxnorm import inverse_rms, scale_rows
from mxtrain.formats.nvfp4 import NVFP4, static_tensor_scale
from mxtrain.formats.nvfp4 import reference as nvfp4
from mxtrain.formats.parse import get_recipe
from mxtrain.rng.philox import rounding_bits, rounding_words
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask

RECIPE = get_recipe("nvfp4")
SIGNS = hadamard_signs(0, "layers.0.attention.wq")
# Forms of operands, for emulated and for native products.
OPERAND_FORMS = ("image", "blocked")


def sign_number(device: str) -> torch.Tensor:
    """Return the signs of the Hadamard transform as the kernels take them."""
    return torch.tensor(sign_mask(SIGNS), device=device)


def random_draws(device: str) -> torch.Tensor:
    """Return the position of the random bits, in the order of ``RecipeModule.draws``."""
    return torch.tensor([rounding_key(0, "layers.0.attention.wq"), 1000, 0, 0], device=device)


# The reference


def cast_in_pytorch(x: torch.Tensor, tensor_scale, form: str, bits: torch.Tensor | None = None) -> tuple:
    """Return (data, scales) of x [R, C] cast along C; scales is None for an image."""
    return in_form(*nvfp4.cast(x, tensor_scale, bits), tensor_scale, form)


def in_form(codes: torch.Tensor, scales: torch.Tensor, tensor_scale, form: str) -> tuple:
    """Return codes and scales as (data, scales) in the form of a kernel's result."""
    if form == "image":
        return nvfp4.dequantize(codes, scales, tensor_scale, torch.bfloat16), None
    if form == "codes":
        return codes, scales
    # As bytes: Inductor cannot pad float8.
    return codes, casts.to_blocked(scales.view(torch.uint8)).view(scales.dtype)


def same_results(results, expected) -> bool:
    """Return whether two results hold the same tensors, bit for bit."""
    results, expected = tensors(results), tensors(expected)
    return len(results) == len(expected) and all(map(same_bits, results, expected))


# Section norm


def norm_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.nvfp4.norm import nvfp4_norm, nvfp4_rows

    x, gain = draw(shape, device), draw(shape[1:], device)
    peers = ("RMSNorm + torchao, compiled",)

    def estimated(**settings) -> tuple[RMSEstimate, float]:
        rms = RMSEstimate.for_recipe(RECIPE, eps=EPS, **settings)
        return rms, static_tensor_scale(shape[1], rms.p, rms.estimator, rms.constant)

    def entry(name: str, form: str, of_rows: bool = False, **settings) -> Entry:
        rms, tensor_scale = estimated(**settings)
        tensor_scale = None if of_rows else tensor_scale
        return ours(
            f"nvfp4_norm {name} {form}",
            lambda: nvfp4_norm(x, rms, tensor_scale, form),
            (x,),
            lambda result: is_nvfp4_norm(result, x, rms, tensor_scale, form),
            peers,
        )

    def rows(form: str) -> Entry:
        check = partial(is_cast_of_rows, x, form)
        return ours(f"nvfp4_rows {form}", lambda: nvfp4_rows(x, None, form), (x,), check, ())

    return [
        *compiled(
            "RMSNorm + torchao",
            rms_norm_to_nvfp4(),
            (x, gain),
            max_autotune,
            lambda result: is_rms_norm_to_nvfp4(result, x, gain),
        ),
        *compiled("MXNorm p=2 in PyTorch", partial(mxnorm_in_pytorch, *estimated(p=2)), (x,), max_autotune),
        entry("p=2", "codes", p=2),
        entry("p=1", "codes", p=1),
        entry("exact", "codes", estimator="exact"),
        entry("p=2", "blocked", p=2),
        entry("p=2", "image", p=2),
        entry("exact", "image", estimator="exact"),
        *(entry("p=2, scales of rows", form, True, p=2) for form in ("codes", "image")),
        *map(rows, ("codes", "image")),
    ]


def rms_norm_to_nvfp4() -> Callable:
    """Return a function of (x, gain): RMSNorm, then torchao's cast with a tensor scale from the largest magnitude."""
    from torchao.prototype.mx_formats.nvfp4_tensor import nvfp4_quantize, per_tensor_amax_to_scale

    def norm_and_cast(x: torch.Tensor, gain: torch.Tensor):
        y = F.rms_norm(x, x.shape[-1:], gain, EPS)
        tensor_scale = per_tensor_amax_to_scale(y.abs().amax())
        scales, codes = nvfp4_quantize(y, NVFP4.block_size, tensor_scale)
        return codes, scales, tensor_scale

    return norm_and_cast


def is_rms_norm_to_nvfp4(result, x: torch.Tensor, gain: torch.Tensor) -> bool:
    y = F.rms_norm(x, x.shape[-1:], gain, EPS)
    codes, scales, tensor_scale = result
    expected = nvfp4.dynamic_tensor_scale(y)
    return torch.equal(tensor_scale, expected) and same_results((codes, scales), nvfp4.cast(y, expected))


def mxnorm_in_pytorch(estimate: RMSEstimate, tensor_scale: float, x: torch.Tensor):
    """MXNorm, p = 2, and its cast as fp32 PyTorch operations. Compiled, it shows what torch.compile alone achieves."""
    rho = cases.inverse_rms_in_fp32(x, estimate)
    return nvfp4.cast(scale_rows(x, rho), tensor_scale), rho


def is_cast_of_rows(x: torch.Tensor, form: str, result) -> bool:
    scales = nvfp4.power_of_two_tensor_scales(x.abs().amax(1).float()).unsqueeze(1)
    return same_results(result[:2], cast_in_pytorch(x, scales, form))


def is_nvfp4_norm(result, x: torch.Tensor, estimate: RMSEstimate, tensor_scale: float | None, form: str) -> bool:
    if not cases.within_ulps(result.rho, inverse_rms(x, estimate, RECIPE), 2):
        return False
    if tensor_scale is None:
        return is_cast_of_rows(scale_rows(x, result.rho), form, result)
    expected = cast_in_pytorch(scale_rows(x, result.rho), tensor_scale, form)
    return same_results((result.data, result.scales), expected)


# Casts that need the largest magnitude first


class Casts(NamedTuple):
    """The casts of one matrix, by kernels and in plain PyTorch. All functions take ``*reads, *numbers`` last.

    Attributes:
        name: name of the matrix.
        reads: the matrix and its factors, which both passes must read.
        numbers: tensors of a few bytes.
        scales: kernel: () -> the tensor scales, fp32 [1, 1 or 2].
        cast: kernel: (tensor scales, form) -> results.
        matrices: PyTorch: () -> the matrix behind each tensor scale.
        reference: PyTorch: (matrices, tensor scales, form) -> results.
    """

    name: str
    reads: tuple[torch.Tensor, ...]
    numbers: tuple[torch.Tensor, ...]
    scales: Callable
    cast: Callable
    matrices: Callable
    reference: Callable


def cast_entries(of: Casts, max_autotune: bool, eager: bool = False) -> list[Entry]:
    """Return peers and kernels for the pass over maxima and, per form, for the cast and for both."""
    args, both_reads = (*of.reads, *of.numbers), 2 * of.reads

    def are_scales(scales) -> bool:
        return torch.equal(scales[0, -len(of.matrices(*args)) :], scales_in_pytorch(*args)[0])

    def scales_in_pytorch(*args):
        return torch.stack([nvfp4.power_of_two_tensor_scale(matrix) for matrix in of.matrices(*args)])[None]

    peer = f"amax {of.name} in PyTorch"
    entries = [
        *counting(of.reads, compiled(peer, scales_in_pytorch, args, max_autotune, are_scales)),
        ours(f"amax {of.name}", lambda: of.scales(*args), of.reads, are_scales, (f"{peer}, compiled",)),
    ]

    for form in OPERAND_FORMS:

        def in_pytorch(*args, form=form):
            matrices = of.matrices(*args)
            return of.reference(matrices, [nvfp4.power_of_two_tensor_scale(m) for m in matrices], form, *args)

        def by_kernels(form=form):
            return of.cast(of.scales(*args), form, *args)

        def is_cast(results, in_pytorch=in_pytorch) -> bool:
            return same_results(results, in_pytorch(*args))

        def cast_alone(form=form):
            return partial(of.cast, of.scales(*args), form, *args)

        name = f"{of.name} {form}"
        peer = f"amax + cast {name} in PyTorch"
        peers = counting(both_reads, compiled(peer, in_pytorch, args, max_autotune, is_cast))
        if eager:
            peers.append(Entry(f"{peer}, eager", partial(partial, in_pytorch, *args), both_reads, is_cast))
        entries += [
            *peers,
            Entry(f"cast {name}", cast_alone, of.reads, is_cast, ours=True),
            Entry(
                f"amax + cast {name}",
                lambda by_kernels=by_kernels: by_kernels,
                both_reads,
                is_cast,
                tuple(entry.name for entry in peers),
                ours=True,
            ),
        ]
    return entries


def counting(reads: tuple[torch.Tensor, ...], entries: list[Entry]) -> list[Entry]:
    """Return ``entries`` that count the bytes of ``reads``."""
    return [entry._replace(reads=reads) for entry in entries]


# Section gradient


def gradient_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.nvfp4.cast import nvfp4_cast
    from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales

    def scales(dy, signs, draws):
        return nvfp4_tensor_scales([dy], signs)

    def cast(scales, form, dy, signs, draws):
        results = nvfp4_cast([dy], scales, form, signs=signs, draws=[draws])
        return results[1], results[0]

    dy, numbers = draw(shape, device), (sign_number(device), random_draws(device))
    casts_of_dy = Casts("dY", (dy,), numbers, scales, cast, gradient_matrices, gradient_in_pytorch)
    # torchao's casts make operands of native products: the blocked form.
    torchaos = {f"{passes} dY blocked": f"torchao {passes} dY" for passes in ("cast", "amax + cast")}
    return [
        Entry("torchao cast dY", lambda: torchao_gradient(dy, False), (dy,)),
        Entry("torchao amax + cast dY", lambda: torchao_gradient(dy, True), (dy, dy)),
        *(
            entry._replace(peers=(torchaos[entry.name], *entry.peers)) if entry.name in torchaos else entry
            for entry in cast_entries(casts_of_dy, max_autotune, eager=True)
        ),
    ]


def gradient_matrices(dy, signs, draws):
    return dy, hadamard(pad(dy), unpack_signs(signs), 0)


def gradient_in_pytorch(matrices, scales, form, dy, signs, draws):
    key, step, microbatch, rank = draws.unbind()
    words = rounding_words(*matrices[1].shape, key, step, rank, microbatch, dy.device)
    by_row = cast_in_pytorch(matrices[0], scales[0], form, rounding_bits(words, 1)[: dy.shape[0]])
    return by_row, along_tokens_in_pytorch(matrices[1], scales[1], form, rounding_bits(words, 0).t())


def along_tokens_in_pytorch(x: torch.Tensor, tensor_scale, form: str, bits: torch.Tensor | None = None) -> tuple:
    """Return (data, scales) of x [T, C] cast along T in the kernels' layout: codes transposed, an image not."""
    data, scales = cast_in_pytorch(x.t(), tensor_scale, form, bits)
    return data.t() if form == "image" else data, scales


def torchao_gradient(dy: torch.Tensor, with_maxima: bool) -> Callable[[], object]:
    """Return torchao's cast for dgrad and wgrad, with or without its pass for the maxima.

    Raises:
        NotRun: if this torchao lacks the kernels, or this device cannot run them.
    """
    package = "torchao.prototype.moe_training.nvfp4_training"
    signs = list(SIGNS)
    try:
        amax = import_module(f"{package}.hadamard_amax_triton").triton_rht_amax
        cast = import_module(f"{package}.hadamard_quantize_row_col_triton").triton_rht_quantize_row_col
        maxima = amax(dy, signs)
    except (ModuleNotFoundError, NotImplementedError) as error:
        raise NotRun(error) from None
    names = ("col_seed_base", "col_offset_base", "row_seed_base", "row_offset_base")
    bases = {name: torch.full((1,), number, device=dy.device) for number, name in enumerate(names)}
    return lambda: cast(dy, *(amax(dy, signs) if with_maxima else maxima), signs, stochastic_rounding=True, **bases)


# Section input


def input_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.nvfp4.cast import nvfp4_cast
    from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales

    def scales(x, rho, signs):
        return nvfp4_tensor_scales([x], signs, rho)

    def cast(scales, form, x, rho, signs):
        return nvfp4_cast([x], scales, form, (0,), signs=signs, row_factor=rho)[0]

    reads, numbers = (draw(shape, device), random_rho(shape[0], device)), (sign_number(device),)
    casts_of_x = Casts("x rho", reads, numbers, scales, cast, input_matrices, input_in_pytorch)
    return cast_entries(casts_of_x, max_autotune)


def input_matrices(x, rho, signs):
    return (hadamard(pad(scale_rows(x, rho)), unpack_signs(signs), 0),)


def input_in_pytorch(matrices, scales, form, x, rho, signs):
    return along_tokens_in_pytorch(matrices[0], scales[0], form)


# Section weight


def weight_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.nvfp4.tensor_scale import nvfp4_tensor_scales
    from mxtrain.formats.nvfp4.weight_cast import nvfp4_weight

    def scales(weight, gain=None):
        return nvfp4_tensor_scales([weight], column_factor=gain)

    def cast(scales, form, weight, gain=None):
        results = nvfp4_weight([weight], [scales], form, gain)
        return results[1] if form == "image" else (results[1], results[0])

    weight, gain = draw(shape, device, torch.float32), draw(shape[1:], device, torch.float32)
    functions = scales, cast, weight_matrices, weight_in_pytorch
    return [
        *cast_entries(Casts("W", (weight,), (), *functions), max_autotune),
        *cast_entries(Casts("W gain", (weight, gain), (), *functions), max_autotune),
    ]


def weight_matrices(weight, gain=None):
    return (weight if gain is None else weight * gain,)


def weight_in_pytorch(matrices, scales, form, weight, gain=None):
    """Codes need a copy per orientation; one image serves both."""
    orientations = matrices if form == "image" else (matrices[0], pad(matrices[0]).t().contiguous())
    return [in_form(*nvfp4.cast(w, scales[0], tiles=True), scales[0], form) for w in orientations]


SECTIONS = {
    "norm": Section(
        "MXNorm and NVFP4 cast of x [T, D], bf16, tensor scale known in advance", cases.NORM_SHAPES, norm_entries
    ),
    "gradient": Section(
        "stochastic casts of a gradient [T, N], bf16: along N, and along T after the transform",
        cases.GRADIENT_SHAPES,
        gradient_entries,
        fastest=True,
    ),
    "input": Section("cast of x * rho [T, D], x bf16, transformed along tokens", cases.INPUT_SHAPES, input_entries),
    "weight": Section(
        "cast of W and W diag(gain), fp32 [N, D], in tiles of 16 x 16", cases.WEIGHT_SHAPES, weight_entries
    ),
}


def main(argv: list[str] | None = None) -> int:
    args = kernel_benchmark.parser(__doc__, SECTIONS).parse_args(argv)
    return kernel_benchmark.run("nvfp4.py", SECTIONS, args)


if __name__ == "__main__":
    sys.exit(main())
