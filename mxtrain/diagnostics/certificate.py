"""A certificate: what one machine casts and multiplies in a training step, for comparison with other machines.

Each case is the three GEMMs of a layer or of stacked experts. X, W and dY are integers times a power of two, drawn by
``mxtrain.rng.philox``. No matrix comes from a product, because machines sum in different orders. So operands are equal
bit for bit on all machines, and the certificate holds their hashes. Norms sum integers, so rho is equal as well.

A product of K terms is compared with the fp64 product of the operands' values. Its error is at most

    K 2^-24 |A| |B|  +  rounding to bf16

The first term holds for fp32 sums in any order, also if tensor cores cut off the bits of small terms. The certificate
holds the largest bound of each product.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

import torch

from mxtrain.errors import ConfigError
from mxtrain.files import os_errors_as, read_json, replace_file
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import TILE_ROWS, make_groups, matmul_rows, matmul_tokens
from mxtrain.formats.hardware import describe_modes
from mxtrain.formats.matrices import CastSpec, Codes, Operand
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import LinearRecipe, Recipe
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.rng.philox import rounding_words
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask

VERSION = 1
SHIPPED = Path(__file__).with_name("certificate.json")
_OPERANDS = {
    ("input", 1): "fprop X",
    ("weight", 1): "fprop W",
    ("gradient", 1): "dgrad dY",
    ("weight", 0): "dgrad W",
    ("gradient", 0): "wgrad dY",
    ("input", 0): "wgrad X",
}
_PRODUCTS = {"fprop": ("Y", "X", "W"), "dgrad": ("dX", "dY", "W"), "wgrad": ("dW", "dY", "X")}
# Step, microbatch and rank of stochastic rounding.
_POSITION = (3, 1, 2)
# Input -> bits of its integers, exponent of the power of two, dtype. bf16 holds 8 bits.
_INPUTS = {
    "X": (7, 0, torch.bfloat16),
    "W": (15, -18, torch.float32),
    "dY": (8, -20, torch.bfloat16),
    "gain": (4, -3, torch.float32),
}
_BANDS = 8
_UNIT, _UNIT_BF16 = 2.0**-24, 2.0**-8


class Target(NamedTuple):
    """Where a certificate is replayed.

    Attributes:
        mode: "reference", "emulated" or "native". Casts of mode "native" also run on GPUs without MX tensor cores.
        device: "cpu" or "cuda".
        multiplies: whether products run.
    """

    mode: str
    device: str
    multiplies: bool = True

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.multiplies else ' casts'} ({self.device})"


class Found(NamedTuple):
    """What a target computes in a case.

    Attributes:
        tensors: operand -> its tensors, as (name, tensor [R, C] or [N]). A name may occur twice.
        products: product -> bf16 tensor.
        exact: product -> its fp64 values, and the largest error of each element; only for mode "reference".
    """

    tensors: dict[str, list[tuple[str, torch.Tensor]]]
    products: dict[str, torch.Tensor]
    exact: dict[str, tuple[torch.Tensor, torch.Tensor]]


def targets() -> list[Target]:
    """Return what this machine can run. The first is mode "reference" on the CPU."""
    found = [Target("reference", "cpu")]
    if torch.cuda.is_available():
        modes = {support.mode: support.available for support in describe_modes("cuda")}
        found += [Target("reference", "cuda")]
        if modes["emulated"]:  # Triton's kernels run here
            found += [Target("emulated", "cuda"), Target("native", "cuda", modes["native"])]
    return found


def new_case(
    recipe: str, shape: tuple[int, int, int], seed: int, norm: tuple[int, str] | None = None, counts: Sequence[int] = ()
) -> dict:
    """Return the settings of a case.

    Args:
        recipe: as in the TOML.
        shape: T, D and N of X [T, D] and W [N, D].
        seed: of all random numbers.
        norm: p and estimator of an MXNorm before the layer.
        counts: of stacked experts, the tokens of each; empty for a single layer.
    """
    tokens, features, outputs = shape
    name = ", ".join((recipe, *([f"MXNorm p={norm[0]} {norm[1]}"] if norm else []), *(["experts"] if counts else [])))
    shapes = {"X": (tokens, features), "W": (max(1, len(counts)) * outputs, features), "dY": (tokens, outputs)}
    shapes |= {"gain": (1, features)} if norm else {}
    inputs = {key: {"key": rounding_key(seed, f"{name} {key}"), "shape": list(of)} for key, of in shapes.items()}
    numbers = {"signs": sign_mask(hadamard_signs(seed, name)), "key": rounding_key(seed, name), "position": _POSITION}
    norm = {"p": norm[0], "estimator": norm[1]} if norm else None
    return {"name": name, "recipe": recipe, "norm": norm, "counts": list(counts), "inputs": inputs, "random": numbers}


def certified(settings: dict) -> dict:
    """Return a case with the hashes of its operands and the bounds of its products, made on the CPU."""
    found = _run(settings, Target("reference", "cpu"))
    hashes = {name: {of: _digest(t) for of, t in tensors} for name, tensors in found.tensors.items()}
    return settings | {"operands": hashes, "bounds": {name: _largest(bound) for name, (_, bound) in found.exact.items()}}


def write(path: Path, cases: Sequence[dict]) -> None:
    """Write the certificate of these cases from ``new_case``. Raises ConfigError if that fails."""
    content = json.loads(json.dumps({"version": VERSION, "cases": [certified(case) for case in cases]}))
    with os_errors_as(f"{path} cannot be written"):
        replace_file(path, (json.dumps(content | {"sha256": _checksum(content)}, indent=1) + "\n").encode())


def read(path: Path) -> list[dict]:
    """Return the cases of a certificate. Raises ConfigError if the file is missing, damaged or of another version."""
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; 'mxtrain certify --write {path}' makes it") from None
    if content.get("version") != VERSION:
        raise ConfigError(f"{path} is no certificate of version {VERSION}: its version is {content.get('version')!r}")
    if content.pop("sha256", None) != _checksum(content):
        raise ConfigError(f"{path} is damaged: its checksum differs; copy it again")
    return content["cases"]


def replay(case: dict, on: Sequence[Target]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Compute a case on all targets; the first is mode "reference".

    Yields:
        The name of an operand or product, what agrees, and what differs, in words.
    """
    with_scales = get_recipe(case["recipe"]).tensor_scaled and case["counts"]  # these have no native products
    found = {target: _run(case, target) for target in on if not (with_scales and target.mode == "native")}
    base, *_ = found.values()
    for name, hashes in case["operands"].items():
        equal, wrong = [], []
        for target, result in found.items():
            tensors = result.tensors.get(name, [])
            problems = [_difference(of, t, hashes, dict(base.tensors[name])) for of, t in tensors]
            problems = list(filter(None, problems)) if tensors else ["it is missing"]
            equal += [] if problems else [str(target)]
            wrong += [f"{target}: {problem}" for problem in problems]
        yield name, [f"equal: {', '.join(equal)}"] if equal else [], wrong
    for name, bound in case["bounds"].items():
        within, wrong = [], []
        exact, bounds = base.exact[name]
        if (largest := _largest(bounds)) != bound:
            wrong.append(f"the largest bound is {largest}, not {bound}")
        for target, result in found.items():
            if name in result.products:
                y = result.products[name].to("cpu", torch.float64)
                share = (y - exact).abs() / bounds
                share = torch.where(y == exact, 0, share)  # also where both are 0; NaN stays
                bad = (~(share <= 1)).nonzero().tolist()
                if bad:
                    at = tuple(bad[0])
                    wrong.append(f"{target}: {list(at)} is {y[at]:.7g}, not {exact[at]:.7g} +- {bounds[at]:.2g}")
                else:
                    within.append(f"{float(share.max()):.2f} {target}")
        yield name, [f"within the bound: {', '.join(within)}"] if within else [], wrong


@dataclass(frozen=True, kw_only=True)
class _WatchedGEMMs(ThreeGEMMs):
    """GEMMs that also cast every matrix to codes with row-major scales, by operand."""

    codes: dict[str, Codes] = field(default_factory=dict)

    def _cast(self, parts, recipes: dict[int, Recipe], spec: CastSpec) -> dict[int, Operand]:
        is_grouped = spec.ends is not None or spec.experts > 1
        for dim, recipe in recipes.items():
            # Experts with tensor scales have no codes. Their values contain tensor scales.
            if recipe.format and not (is_grouped and recipe.format.has_tensor_scale):
                as_codes = spec._replace(as_codes=True)
                cast = recipe.ops.cast(parts, recipe, self.mode, (dim,), as_codes)
                self.codes[_OPERANDS[spec.role, dim]] = cast[dim]
        return super()._cast(parts, recipes, spec)


@torch.no_grad()
def _run(case: dict, target: Target) -> Found:
    """Cast and multiply."""
    recipe, device, random = get_recipe(case["recipe"]), target.device, case["random"]
    inputs = {name: _integers(name, **settings, device=device) for name, settings in case["inputs"].items()}
    x, w, dy, gain = (inputs.get(name) for name in _INPUTS)
    signs = torch.tensor(random["signs"], device=device) if recipe.needs_signs else None
    draws = torch.tensor([random["key"], *random["position"]], device=device) if recipe.needs_draws else None
    gemms = _WatchedGEMMs(recipe.key, target.mode, WHOLE)
    tensors, operands, rho, source, ends = {}, {}, None, None, None
    if draws is not None:
        step, microbatch, rank = random["position"]
        tensors["random bits"] = [("words", rounding_words(*dy.shape, random["key"], step, rank, microbatch, device))]
    if case["counts"]:
        # In every mode the groups of mode "native", so that all modes have the same operands.
        _, ends, source = make_groups(torch.tensor(case["counts"], device=device), len(x), TILE_ROWS)
        source = source[: int(ends[-1])]
        w = w.unflatten(0, (len(ends), -1))
        # As experts do: the key of each is the layer's plus its number.
        draws = draws if draws is None else torch.stack([draws + draws.new_tensor([e, 0, 0, 0]) for e in range(len(ends))])
    if case["norm"]:
        fprop, estimate = recipe.fprop, RMSEstimate.for_recipe(recipe.fprop, **case["norm"])
        operands["fprop X"], rho = fprop.ops.normalize(x, estimate, fprop, target.mode)
        gemms.codes["fprop X"] = fprop.ops.normalize(x, estimate, fprop, target.mode, as_codes=True)[0]
        tensors["rho"] = [("fp32", rho)]
    else:
        operands["fprop X"] = gemms.quantize_activation(x, source, ends)
    weights = gemms.quantize_weights([w], None if gain is None else gain[0])
    operands |= {"fprop W": weights[1], "dgrad W": weights[0]}
    of_dy = gemms.quantize_gradients([dy], True, True, signs, [draws], source, ends)
    operands |= dict(zip(("dgrad dY", "wgrad dY"), of_dy))
    operands["wgrad X"] = gemms.quantize_along_tokens(x, rho, signs, source, ends)
    for name in _OPERANDS.values():
        tensors[name] = list(_tensors(_recipe_of(recipe, name), operands[name], gemms.codes.get(name), target.mode))
    products = _products(recipe, operands, ends, torch.bfloat16) if target.multiplies else {}
    return Found(tensors, products, _exact(recipe, operands, ends) if target.mode == "reference" else {})


def _integers(name: str, key: int, shape: list[int], device: str) -> torch.Tensor:
    """An input [rows, columns]: integers times a power of two. Every tile of 16 x 16 has another number of bits."""
    (rows, columns), (bits, exponent, dtype) = shape, _INPUTS[name]
    words = rounding_words(rows, columns, key, 0, 0, device=device)
    fewer = rounding_words(-(-rows // 16), -(-columns // 16), key, 1, 0, device=device) % bits
    fewer = fewer.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    sizes = (words >> 1) % 2**bits >> fewer
    return (torch.where(words % 2 == 1, -sizes, sizes).double() * 2.0**exponent).to(dtype)


def _recipe_of(recipe: LinearRecipe, name: str) -> Recipe:
    gemm, matrix = name.split()
    of_gemm = getattr(recipe, gemm)
    return of_gemm.of_gradients if matrix == "dY" else of_gemm


def _tensors(recipe: Recipe, operand: Operand, codes: Codes | None, mode: str) -> Iterator[tuple[str, torch.Tensor]]:
    """What is compared of an operand. A native operand has the codes and, in another layout, the scales of ``codes``."""
    if codes is not None and codes.scales is not None:
        yield from (("codes", codes.data), ("scales", codes.scales))
        if codes.scale is not None:
            yield "tensor scale", codes.scale
        if mode == "reference" and recipe.format.is_native:
            yield "blocked scales", recipe.ops.from_codes(codes, "native", 1).scales
    if operand.scales is None:
        yield "values", operand.data.float()
    else:
        yield from (("codes", operand.data), ("blocked scales", operand.scales))
    if operand.tensor_scale is not None:
        yield "tensor scale", operand.tensor_scale


def _products(
    recipe: LinearRecipe, operands: dict[str, Operand], ends: torch.Tensor | None, dtype: torch.dtype
) -> dict[str, torch.Tensor]:
    found = {}
    for gemm, (result, *factors) in _PRODUCTS.items():
        a, b = (operands[f"{gemm} {matrix}"] for matrix in factors)
        if ends is None:
            found[f"{gemm} {result}"] = getattr(recipe, gemm).ops.matmul(a, b, dtype)
        else:
            multiply = matmul_tokens if gemm == "wgrad" else matmul_rows
            found[f"{gemm} {result}"] = multiply(a, b, ends, dtype)
    return found


def _exact(recipe: LinearRecipe, operands: dict[str, Operand], ends) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """The fp64 products, and how far each element of other products may be from them."""
    wide = {}
    for name, (data, _, scale) in operands.items():
        wide[name] = Operand(data.double() if scale is None else data.double() * scale.double().unsqueeze(-1))
    exact = _products(recipe, wide, ends, torch.float64)
    sizes = _products(recipe, {name: Operand(of.data.abs()) for name, of in wide.items()}, ends, torch.float64)
    found = {}
    for name, product in exact.items():
        terms = wide[f"{name.split()[0]} {_PRODUCTS[name.split()[0]][1]}"].data.shape[1]
        of_sums = terms * _UNIT * sizes[name]
        found[name] = product.cpu(), (of_sums + _UNIT_BF16 * (product.abs() + of_sums)).cpu()
    return found


def _largest(bounds: torch.Tensor) -> float:
    return float(f"{float(bounds.max()):.6g}")


def _as_integers(x: torch.Tensor) -> torch.Tensor:
    """The bits of x, at least one dimension, on the CPU."""
    x = x.detach().reshape(x.shape or (1,)).cpu().contiguous()
    return x.view({1: torch.uint8, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _digest(x: torch.Tensor) -> str:
    """Hashes of ``_BANDS`` bands of rows, one after the other."""
    bands = _as_integers(x).tensor_split(_BANDS)
    return "".join(sha256(band.numpy().tobytes()).hexdigest()[: 64 // _BANDS] for band in bands)


def _difference(name: str, x: torch.Tensor, hashes: dict[str, str], base: dict[str, torch.Tensor]) -> str | None:
    """How x differs from a certificate: the first element, if ``base`` agrees with the certificate. Or else, where."""
    wanted, found = hashes.get(name, ""), _digest(x)
    if found == wanted:
        return None
    x = _as_integers(x)
    if name in base and _digest(base[name]) == wanted and (right := _as_integers(base[name])).shape == x.shape:
        at = tuple((x != right).nonzero()[0].tolist())
        show = (lambda t: hex(int(t))) if x.dtype != torch.int32 else (lambda t: f"{float(t.view(torch.float32)):.9g}")
        return f"{name}{list(at)} is {show(x[at])}, not {show(right[at])}"
    size = 64 // _BANDS
    band = next((i for i in range(_BANDS) if found[i * size :][:size] != wanted[i * size :][:size]), 0)
    rows = x.new_empty(len(x), 0).tensor_split(_BANDS)
    first = sum(map(len, rows[:band]))
    return f"{name} {list(x.shape)} differ first between rows {first} and {first + max(len(rows[band]) - 1, 0)}"


def _checksum(content: dict) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
