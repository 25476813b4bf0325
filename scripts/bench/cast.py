"""The Triton kernels against PyTorch, torchao and Liger: time, bytes moved, share of the copy bandwidth.

    python scripts/bench/cast.py                                  every section
    python scripts/bench/cast.py --only norm,dual --json cast.json --plot cast.png
    python scripts/bench/cast.py --only norm --shapes 32768x4096 --profiler
    python scripts/bench/cast.py --check                          results only, no times

Every result is compared with the plain PyTorch reference on the same input before it is timed. "ok" means: casts equal
the reference bit for bit (given the kernel's own rho, which is within 2 ulp of the reference's), and gradients equal it
up to rounding. A peer with other bits is marked "differs".

Bytes count every input once and every output once. "of copy" is the share of the bandwidth that a copy of 1 GiB
reaches; "of same-size copy" is the share for a copy of as many bytes, which pays the same few us to start and to end.
Times are medians with the L2 cache flushed before every run: between CUDA events, or with --profiler the sum of a
call's kernels. Events include launch overhead, which matters below about 20 us.
"""

import importlib.util
import sys
from collections.abc import Callable
from unittest import mock

import cast_cases as cases
import kernel_benchmark
import torch
import torch.nn.functional as F
from cast_cases import EPS, random_rho
from kernel_benchmark import Entry, Section, Shape, compiled, draw, interpreting, is_rounding_apart, ours, same_bits

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import make_groups
from mxtrain.formats.matrices import joined, rows_in_order
from mxtrain.formats.mx import reference as casts
from mxtrain.formats.mxfp8 import MXFP8
from mxtrain.formats.mxnorm import inverse_rms, norm_backward, scale_rows
from mxtrain.formats.parse import get_recipe

RECIPE = get_recipe("mxfp8")


# Checks


def is_cast(result: tuple, y: torch.Tensor, dim: int, form: str) -> bool:
    """Return whether ``result`` is the reference's (data, scales) for ``y`` cast along ``dim``."""
    data, scales = result
    if form == "image":
        return same_bits(data, casts.image(y, MXFP8, RECIPE.scale_rounding, dim, torch.bfloat16))
    codes, row_major = casts.cast(y if dim == 1 else y.t().contiguous(), MXFP8, RECIPE.scale_rounding)
    return same_bits(data, codes) and same_bits(scales, casts.to_blocked(row_major) if form == "blocked" else row_major)


# Section norm


def norm_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.mx.norm import mxnorm_cast

    x, gain = draw(shape, device), draw(shape[1:], device)
    # Triton's interpreter truncates to bf16 instead of rounding, so it gets a residual whose sum is exact in bf16.
    residual = x * -0.5 if interpreting() else draw(shape, device)
    peers = ("RMSNorm + to_mx, compiled",)

    def entry(name: str, form: str = "codes", residual: torch.Tensor | None = None, **estimate) -> Entry:
        rms = RMSEstimate.for_recipe(RECIPE, eps=EPS, **estimate)
        return ours(
            f"mxnorm_cast {name}",
            lambda: mxnorm_cast(x, rms, RECIPE, form, residual),
            (x,) if residual is None else (x, residual),
            lambda result: is_mxnorm_cast(result, x, residual, rms, form),
            peers,
        )

    return [
        *compiled("RMSNorm + to_mx", rms_norm_to_mx, (x, gain), max_autotune),
        *compiled("MXNorm p=2 in PyTorch", mxnorm_in_pytorch, (x,), max_autotune),
        entry("p=2 codes", p=2),
        entry("p=1 codes", p=1),
        entry("exact codes", estimator="exact"),
        entry("p=2 blocked", "blocked"),
        entry("p=2 image", "image"),
        entry("exact image", "image", estimator="exact"),
        entry("p=2 codes + residual", residual=residual),
        entry("p=2 image + residual", "image", residual=residual),
        entry("exact image + residual", "image", residual=residual, estimator="exact"),
    ]


def rms_norm_to_mx(x: torch.Tensor, gain: torch.Tensor):
    """RMSNorm, then torchao's cast."""
    return casts.cast(F.rms_norm(x, x.shape[-1:], gain, EPS), MXFP8, RECIPE.scale_rounding)


_ESTIMATE = RMSEstimate.for_recipe(RECIPE, p=2, eps=EPS)


def mxnorm_in_pytorch(x: torch.Tensor):
    """MXNorm, p = 2, as fp32 PyTorch operations. Compiled, it shows what torch.compile alone achieves."""
    rho = cases.inverse_rms_in_fp32(x, _ESTIMATE)
    return casts.cast(scale_rows(x, rho), MXFP8, RECIPE.scale_rounding), rho


def is_mxnorm_cast(result, x, residual, estimate: RMSEstimate, form: str) -> bool:
    if residual is not None:
        x = (x.float() + residual.float()).to(x.dtype)
        if not same_bits(result.total, x):
            return False
    if not cases.within_ulps(result.rho, inverse_rms(x, estimate, RECIPE), 2):
        return False
    return is_cast((result.data, result.scales), scale_rows(x, result.rho), 1, form)


# Section backward


def backward_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.norms.mxnorm_backward import norm_backward as kernel

    g, x, rho = draw(shape, device), draw(shape, device), random_rho(shape[0], device)
    peers = ("norm backward in PyTorch, compiled",)
    entries = compiled("norm backward in PyTorch", norm_backward_in_pytorch, (g, x, rho), max_autotune)
    if importlib.util.find_spec("liger_kernel"):
        gain = draw(shape[1:], device)
        reads = (g, x, gain, rho)  # Liger saves an inverse RMS of the same size as rho
        entries.append(Entry("Liger RMSNorm backward (also dgamma)", lambda: liger_backward(g, x, gain), reads))
    return entries + [
        ours(
            "norm_backward",
            lambda: kernel(g, x, rho),
            (g, x, rho),
            lambda dx: is_rounding_apart(dx, norm_backward(g, x, rho)),
            peers,
        ),
    ]


def norm_backward_in_pytorch(g: torch.Tensor, x: torch.Tensor, rho: torch.Tensor) -> torch.Tensor:
    """dx of the straight-through backward as fp32 PyTorch operations."""
    xhat = scale_rows(x, rho)
    g = g.float()
    return ((g - xhat * (g * xhat).mean(-1, keepdim=True)) * rho.unsqueeze(-1)).to(x.dtype)


def liger_backward(g: torch.Tensor, x: torch.Tensor, gain: torch.Tensor) -> Callable[[], object]:
    """Return Liger's RMSNorm backward (dx and dgamma), fed with what its forward saved."""
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _, _, rstd, block_size, warps, casting = rms_norm_forward(x, gain, EPS, 0.0, "llama", False)
    return lambda: rms_norm_backward(g, x, gain, rstd, 0.0, casting, block_size, warps, False, False)


# Section dual


def dual_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.mx.cast import cast

    x = draw(shape, device)

    def are_casts(results, form: str) -> bool:
        return all(is_cast(result, x, dim, form) for dim, result in results.items())

    def are_torchaos_casts(results) -> bool:
        by_row, (column_codes, column_scales) = results
        return are_casts({1: by_row, 0: (column_codes.t(), column_scales)}, "codes")

    return [
        Entry("torchao triton dim0 + dim1", lambda: torchao_dual(x), (x,), are_torchaos_casts),
        *compiled("to_mx twice", to_mx_twice, (x,), max_autotune),
        *compiled("two images in PyTorch", two_images, (x,), max_autotune),
        *(
            ours(
                f"cast (0, 1) {form}",
                lambda form=form: cast(x, RECIPE, (1, 0), form),
                (x,),
                lambda results, form=form: are_casts(results, form),
                ("torchao triton dim0 + dim1", "to_mx twice, compiled"),
            )
            for form in ("codes", "blocked")
        ),
        ours(
            "cast (0, 1) image",
            lambda: cast(x, RECIPE, (1, 0), "image"),
            (x,),
            lambda results: are_casts(results, "image"),
            ("two images in PyTorch, compiled",),
        ),
    ]


def torchao_dual(x: torch.Tensor) -> Callable[[], object]:
    """Return torchao's two Triton casts of x, along rows and along columns, with RCEIL scales."""
    kernels = torchao_triton_kernels()
    mode = RECIPE.scale_rounding
    return lambda: (
        kernels.triton_to_mxfp8_dim0(x, MXFP8.block_size, mode),
        kernels.triton_to_mxfp8_dim1(x, MXFP8.block_size, mode),
    )


_TORCHAO_KERNELS = []


def torchao_triton_kernels():
    """Return the module with torchao's Triton casts, patched to load below compute capability 10.0.

    torchao defines these casts for 10.0 and later, where the RCEIL scale is an instruction. Its AMD branch computes the
    same scale with arithmetic, so on older GPUs a second copy of the module is loaded with only that branch switched
    on. Tiles, tuning and everything else stay the same.
    """
    if not _TORCHAO_KERNELS:
        spec = importlib.util.find_spec("torchao.prototype.mx_formats.kernels")
        if torch.cuda.get_device_capability() >= (10, 0):
            module = importlib.import_module(spec.name)
        else:
            module = importlib.util.module_from_spec(spec)
            with (
                mock.patch("torchao.utils.is_ROCM", return_value=True),
                mock.patch("torchao.utils.is_MI350", return_value=True),
            ):
                spec.loader.exec_module(module)
        _TORCHAO_KERNELS.append(module)
    return _TORCHAO_KERNELS[0]


def to_mx_twice(x: torch.Tensor):
    """torchao's cast along both dimensions, as PyTorch operations."""
    return tuple(casts.cast(y, MXFP8, RECIPE.scale_rounding) for y in (x, x.t().contiguous()))


def two_images(x: torch.Tensor):
    """bf16 images of the casts along both dimensions, as PyTorch operations."""
    return tuple(casts.image(x, MXFP8, RECIPE.scale_rounding, dim, torch.bfloat16) for dim in (1, 0))


# Section column


def column_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.mx.cast import cast

    rho = random_rho(shape[0], device)
    entries = []
    for dtype, word in ((torch.bfloat16, "bf16"), (torch.float32, "fp32")):
        x = draw(shape, device, dtype)
        functions = {"codes": column_codes, "image": column_image}
        for form, function in functions.items():
            entries += compiled(f"{word} x rho, {form} in PyTorch", function, (x, rho), max_autotune)
            entries.append(
                ours(
                    f"cast {word} x rho (0,) {form}",
                    lambda x=x, form=form: cast(x, RECIPE, (0,), form, row_factor=rho),
                    (x, rho),
                    lambda results, x=x, form=form: is_cast(results[0], scale_rows(x, rho), 0, form),
                    (f"{word} x rho, {form} in PyTorch, compiled",),
                )
            )
    return entries


def column_codes(x: torch.Tensor, rho: torch.Tensor):
    """Codes and scales of x * rho along the rows, as PyTorch operations."""
    return casts.cast(scale_rows(x, rho).t().contiguous(), MXFP8, RECIPE.scale_rounding)


def column_image(x: torch.Tensor, rho: torch.Tensor):
    """The bf16 image of x * rho cast along the rows, as PyTorch operations."""
    return casts.image(scale_rows(x, rho), MXFP8, RECIPE.scale_rounding, 0, torch.bfloat16)


# Section fold


def fold_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.mx.cast import cast, cast_tiles
    from mxtrain.formats.mx.decode import decode_tiles
    from mxtrain.norms.mxnorm_backward import fold_backward

    weight, gain = draw(shape, device, torch.float32), draw(shape[1:], device, torch.float32)
    d_folded = draw(shape, device)
    entries = []
    for form, function in (("codes", folded_codes), ("image", folded_images)):
        entries += compiled(f"fold, {form} in PyTorch", function, (weight, gain), max_autotune)
        entries.append(
            ours(
                f"cast W gain (0, 1) {form}",
                lambda form=form: cast(weight, RECIPE, (1, 0), form, column_factor=gain),
                (weight, gain),
                lambda results, form=form: all(
                    is_cast(result, weight * gain, dim, form) for dim, result in results.items()
                ),
                (f"fold, {form} in PyTorch, compiled",),
            )
        )
    for word, w in (("", weight), ("bf16 ", draw(shape, device))):
        blocks = f"cast {word}W gain (0, 1) image"
        if word:
            entries.append(
                ours(
                    blocks,
                    lambda w=w: cast([w], RECIPE, (1, 0), "image", column_factor=gain),
                    (w, gain),
                    lambda results, w=w: is_cast(results[1], w * gain, 1, "image"),
                    (),
                )
            )
        entries.append(
            ours(
                f"cast {word}W gain in tiles, image",
                lambda w=w: cast_tiles([w], RECIPE, (1,), "image", gain)[1],
                (w, gain),
                lambda result, w=w: same_bits(result.data, image_of_tiles(w * gain)),
                (blocks,),
            )
        )
    # What FSDP's processes do with mxnorm.fsdp_gather = "quantized", before and after the gather.
    codes, scales = casts.cast(weight, MXFP8, RECIPE.scale_rounding, tiles=True)
    of_tiles, values = (
        scales.view(torch.uint8)[::32].contiguous(),
        torch.empty(shape, dtype=d_folded.dtype, device=device),
    )

    def decode() -> torch.Tensor:
        decode_tiles(codes, of_tiles, values)
        return values

    entries += [
        ours(
            "cast W gain in tiles, codes",
            lambda: cast_tiles([weight], RECIPE, (1,), "codes", gain)[1],
            (weight, gain),
            lambda result: same_bits(
                result.data, casts.cast(weight * gain, MXFP8, RECIPE.scale_rounding, tiles=True)[0]
            ),
            (),
        ),
        ours(
            "decode tiles",
            decode,
            (codes, of_tiles),
            lambda result: same_bits(result, casts.dequantize(codes, scales, MXFP8, result.dtype)),
            ("cast bf16 W gain in tiles, image",),
        ),
    ]
    return entries + [
        *compiled("fold backward in PyTorch", fold_backward_in_pytorch, (d_folded, weight, gain), max_autotune),
        ours(
            "fold_backward",
            lambda: fold_backward(d_folded, weight, gain),
            (d_folded, weight, gain),
            lambda result: is_fold_backward(result, d_folded, weight, gain),
            ("fold backward in PyTorch, compiled",),
        ),
    ]


def folded_codes(weight: torch.Tensor, gain: torch.Tensor):
    """Codes and scales of W diag(gain) along both dimensions, as PyTorch operations."""
    return to_mx_twice(weight * gain)


def folded_images(weight: torch.Tensor, gain: torch.Tensor):
    """bf16 images of W diag(gain) along both dimensions, as PyTorch operations."""
    return two_images(weight * gain)


def image_of_tiles(x: torch.Tensor) -> torch.Tensor:
    """The bf16 image of x, cast in tiles."""
    return casts.image(x, MXFP8, RECIPE.scale_rounding, 1, torch.bfloat16, tiles=True)


def fold_backward_in_pytorch(d_folded: torch.Tensor, weight: torch.Tensor, gain: torch.Tensor):
    """dW and dgain from dL/d(W diag(gain)), as PyTorch operations."""
    d_folded = d_folded.float()
    return d_folded * gain, (weight * d_folded).sum(0)


def is_fold_backward(result, d_folded, weight, gain) -> bool:
    d_weight, d_gain = result
    products = weight.double() * d_folded.double()
    near = (d_gain - products.sum(0)).abs() <= 1e-5 * products.abs().sum(0)
    return same_bits(d_weight, d_folded.float() * gain) and bool(near.all())


# Section experts

EXPERTS = 256


def expert_entries(shape: Shape, device: str, max_autotune: bool) -> list[Entry]:
    from mxtrain.formats.mx.cast import cast

    x, source = draw(shape, device), source_of_experts(shape[0], device)
    entries = compiled("gather and image in PyTorch", gathered_image, (x, source), max_autotune)
    for dims, form in (((1,), "image"), ((0,), "image"), ((1, 0), "image"), ((1, 0), "blocked")):
        entries.append(
            ours(
                f"gather + cast {dims} {form}",
                lambda dims=dims, form=form: cast(x, RECIPE, dims, form, source=source),
                (x, source),
                lambda results, form=form: all(
                    is_cast(result, rows_in_order(x, source), dim, form) for dim, result in results.items()
                ),
                ("gather and image in PyTorch, compiled",) if dims == (1,) else (),
            )
        )
    parts, experts = (draw(shape, device), draw(shape, device)), max(1, shape[0] // 512)
    for dim in (1, 0):
        entries.append(
            ours(
                f"cast of W1 and W3 ({dim},) image",
                lambda dim=dim: cast(parts, RECIPE, (dim,), "image", experts=experts),
                parts,
                lambda results, dim=dim: is_cast(results[dim], joined(parts, 0, experts), dim, "image"),
                (),
            )
        )
    return entries


def source_of_experts(tokens: int, device: str) -> torch.Tensor:
    """The token of every row, tokens in random order, of experts with numbers of tokens as by Zipf's law."""
    share = 1 / torch.arange(1, min(EXPERTS, tokens) + 1)
    counts = torch.bincount(
        torch.multinomial(share, tokens, replacement=True, generator=torch.Generator().manual_seed(0)),
        minlength=len(share),
    )
    source = make_groups(counts, tokens, 32).source
    order = torch.randperm(tokens, generator=torch.Generator().manual_seed(1))
    return torch.where(source < 0, source, order[source]).to(device)


def gathered_image(x: torch.Tensor, source: torch.Tensor):
    """The bf16 image of rows in the order of experts, as PyTorch operations."""
    rows = rows_in_order(x, source)
    return casts.image(rows, MXFP8, RECIPE.scale_rounding, 1, torch.bfloat16)


SECTIONS = {
    "norm": Section(
        "norm and cast of x [T, D], bf16",
        cases.NORM_SHAPES,
        norm_entries,
    ),
    "backward": Section(
        "straight-through norm backward, bf16 [T, D]",
        (
            *((32768, 256), (32768, 768), (32768, 1024), (16384, 2048), (8192, 4096)),
            *((32768, 4096), (8192, 8192), (4096, 16384), (1152000, 384)),
        ),
        backward_entries,
    ),
    "dual": Section(
        "casts of a gradient [T, N], bf16, along both dimensions",
        cases.GRADIENT_SHAPES,
        dual_entries,
    ),
    "column": Section(
        "cast of x * rho [T, D] along tokens",
        cases.INPUT_SHAPES,
        column_entries,
    ),
    "fold": Section(
        "casts of W diag(gain), fp32 [N, D], along both dimensions, and the backward of the fold",
        cases.WEIGHT_SHAPES,
        fold_entries,
    ),
    "experts": Section(
        "tokens [T, D] in the order of 256 experts with tokens by Zipf's law; weights of stacked experts of 512 rows",
        ((16384, 2048), (49152, 2048), (16384, 7168)),
        expert_entries,
    ),
}


def main(argv: list[str] | None = None) -> int:
    args = kernel_benchmark.parser(__doc__, SECTIONS).parse_args(argv)
    return kernel_benchmark.run("cast.py", SECTIONS, args)


if __name__ == "__main__":
    sys.exit(main())
