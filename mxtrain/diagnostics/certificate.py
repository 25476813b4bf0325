"""A certificate: what one machine casts and multiplies in a training step, for comparison with other machines.

Each case is the three GEMMs of a layer or of stacked experts. X, W and dY are integers times a power of two, drawn by
``mxtrain.rng.philox``. No matrix comes from a product, because machines sum in different orders. So operands are equal
bit for bit on all machines, and the certificate holds their hashes. A norm sums integers, so rho is equal, too.

A product of K terms is compared with the fp64 product of its operands. Its error is at most

    K 2^-24 |A| |B|  +  rounding to bf16

The first term holds for fp32 sums in any order, also if tensor cores cut off the last bits of small terms.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import repeat
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from mxtrain.errors import ConfigError, one_line
from mxtrain.files import os_errors_as, read_json, replace_file
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.gemm import TILE_ROWS, make_groups, matmul_rows, matmul_tokens
from mxtrain.formats.hardware import describe_modes
from mxtrain.formats.matrices import CastSpec, Codes, Operand
from mxtrain.formats.mx.reference import cast_of_torchao
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.formats.parse import get_recipe
from mxtrain.formats.recipe import LinearRecipe, Recipe
from mxtrain.nn.split import WHOLE
from mxtrain.nn.three_gemms import ThreeGEMMs
from mxtrain.rng.philox import rounding_words
from mxtrain.rng.seeds import hadamard_signs, rounding_key, sign_mask

VERSION = 1
SHIPPED = Path(__file__).with_name("certificate.json")
_OPERANDS = {("input", 1): "fprop X", ("weight", 1): "fprop W", ("gradient", 1): "dgrad dY"}
_OPERANDS |= {("weight", 0): "dgrad W", ("gradient", 0): "wgrad dY", ("input", 0): "wgrad X"}
_PRODUCTS = {
    "fprop Y": ("fprop X", "fprop W"),
    "dgrad dX": ("dgrad dY", "dgrad W"),
    "wgrad dW": ("wgrad dY", "wgrad X"),
}
# Input -> bits of its integers, exponent of the power of two, dtype. bf16 holds 8 bits.
_INPUTS = {"X": (7, 0, torch.bfloat16), "W": (15, -18, torch.float32), "dY": (8, -20, torch.bfloat16)}
_INPUTS["gain"] = (4, -3, torch.float32)
_SEED, _STEP, _MICROBATCH, _RANK = 0, 3, 1, 2
_UNIT, _UNIT_OF_BF16 = 2.0**-24, 2.0**-8


class Target(NamedTuple):
    """Where a certificate is replayed: mode and device, and whether products run.

    Mode "torchao" is torchao's casts, where they round as ours do. Casts of mode "native" run on all GPUs with kernels.
    """

    mode: str
    device: str
    multiplies: bool = True

    def __str__(self) -> str:
        return f"{self.mode}{'' if self.multiplies else ' casts'} ({self.device})"


REFERENCE = Target("reference", "cpu")


def targets() -> list[Target]:
    """Return what this machine runs, ``REFERENCE`` first."""
    found = [REFERENCE, Target("torchao", "cpu", False)]
    if torch.cuda.is_available():
        modes = {support.mode: support.available for support in describe_modes("cuda")}
        found += [Target("reference", "cuda"), Target("torchao", "cuda", False)]
        if modes["emulated"]:
            found += [Target("emulated", "cuda"), Target("native", "cuda", modes["native"])]
    return found


def certified(recipe: str, shape: tuple[int, int, int], norm: dict | None = None, counts: Sequence[int] = ()) -> dict:
    """Return a case: its settings, the hashes of its operands and the bounds of its products.

    Args:
        recipe: as in the TOML.
        shape: T, D and N of X [T, D] and W [N, D]; T in whole blocks.
        norm: p and estimator of an MXNorm before the layer; None without.
        counts: of stacked experts, the tokens of each; empty for a single layer.
    """
    tokens, features, outputs = shape
    of_norm = ", MXNorm p={p} {estimator}".format(**norm) if norm else ""
    name = f"{recipe}{of_norm}{', experts' if counts else ''}"
    shapes = {"X": (tokens, features), "W": (max(1, len(counts)) * outputs, features), "dY": (tokens, outputs)}
    shapes |= {"gain": (1, features)} if norm else {}
    case = {"name": name, "recipe": recipe, "norm": norm, "counts": list(counts)}
    case["inputs"] = {of: {"key": rounding_key(_SEED, f"{name} {of}"), "shape": list(shapes[of])} for of in shapes}
    case["signs"] = sign_mask(hadamard_signs(_SEED, name))
    case["draws"] = [rounding_key(_SEED, name), _STEP, _MICROBATCH, _RANK]
    tensors, _, exact = _run(case, REFERENCE)
    case["operands"] = {name: {of: _hash(tensor) for of, tensor in found} for name, found in tensors.items()}
    return case | {"bounds": {name: _largest(bounds) for name, (_, bounds) in exact.items()}}


def write(path: Path, cases: Sequence[dict]) -> None:
    content = {"version": VERSION, "cases": list(cases)}
    text = json.dumps(content | {"sha256": _checksum(content)}).replace('{"name"', '\n{"name"')  # a line for each case
    with os_errors_as(f"{path} cannot be written"):
        replace_file(path, f"{text}\n".encode())


def read(path: Path) -> list[dict]:
    try:
        content = read_json(path)
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; 'mxtrain certify --write {path}' makes it") from None
    if (version := content.get("version")) != VERSION:
        raise ConfigError(f"{path} is a certificate of version {version!r}; this mxtrain reads version {VERSION}")
    if content.pop("sha256", None) != _checksum(content):
        raise ConfigError(f"{path} is damaged: its content does not match its checksum; copy it again")
    return content["cases"]


def replay(case: dict, on: Sequence[Target]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Compute a case on targets, of which the first is ``REFERENCE``.

    Yields:
        The name of an operand or product, the targets that agree, and what differs, in words.
    """
    # Experts with tensor scales have no native operands.
    skipped = "native" if case["counts"] and get_recipe(case["recipe"]).tensor_scaled else ""
    found = {target: _run(case, target) for target in on if target.mode != skipped}
    tensors_of_base, _, exact = found[REFERENCE]
    for name, hashes in case["operands"].items():
        agree, wrong, base = [], [], dict(tensors_of_base[name])
        for target, (tensors, _, _) in found.items():
            compared = [_difference(of, tensor, hashes.get(of), base) for of, tensor in tensors.get(name, ())]
            wrong += [f"{target}: {problem}" for problem in compared if problem]
            agree += [str(target)] if compared and not any(compared) else []
        yield name, agree, wrong
    for name, bound in case["bounds"].items():
        values, bounds = exact[name]
        agree, wrong = [], [f"the bound is {own}, not {bound}" for own in [_largest(bounds)] if own != bound]
        for target, (_, products, _) in found.items():
            if isinstance(y := products.get(name), str):
                wrong.append(f"{target}: {y}")
            elif y is not None:
                y = y.to("cpu", torch.float64)
                if bad := (~((y - values).abs() <= bounds)).nonzero().tolist():  # no NaN is <=
                    at = tuple(bad[0])
                    wrong.append(f"{target}: {list(at)} is {y[at]:.7g}, not {values[at]:.7g} +- {bounds[at]:.2g}")
                else:
                    agree.append(str(target))
        yield name, agree, wrong


def replay_all(cases: Sequence[dict], on: Sequence[Target], processes: int) -> Iterator[list]:
    """Yield for each case what ``replay`` yields. Processes compile kernels side by side; 1 means this process."""
    if processes == 1:
        yield from map(_replay_as_list, cases, repeat(on))
        return
    options = dict(mp_context=get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,))
    with ProcessPoolExecutor(processes, **options) as pool:
        yield from pool.map(_replay_as_list, cases, repeat(on))


def _replay_as_list(case: dict, on: Sequence[Target]) -> list:
    return list(replay(case, on))


@dataclass(frozen=True, kw_only=True)
class _WatchedGEMMs(ThreeGEMMs):
    """GEMMs that keep what is compared of each operand, as (name, tensor). A name may occur twice."""

    target: Target
    tensors: dict[str, list[tuple[str, torch.Tensor]]] = field(default_factory=dict)

    def _cast(self, parts, recipes: dict[int, Recipe], spec: CastSpec) -> dict[int, Operand]:
        operands = super()._cast(parts, recipes, spec)
        for dim, recipe in recipes.items():
            if recipe.dequantizes:  # does not cast dY
                continue
            codes, x = None, spec.scaled(spec.joined(parts))
            if self.mode == "reference":
                codes = recipe.ops.cast(parts, recipe, self.mode, (dim,), spec._replace(as_codes=True))[dim]
            is_ours = recipe.has_tiles(spec.role) or recipe.error_for(spec.role)
            is_ours = is_ours or (spec.role == "gradient" and recipe.stochastic_rounding)
            is_ours = is_ours or (dim == 0 and spec.is_transformed(recipe))
            self.keep(_OPERANDS[spec.role, dim], recipe, operands[dim], codes, x if dim else x.t(), is_ours)
        return operands

    def keep(self, name: str, recipe: Recipe, operand: Operand, codes: Codes | None, x: torch.Tensor, is_ours) -> None:
        """Keep the operand [R, K] of x [R, K]; of target "torchao" its cast of x, unless only we round like this."""
        if self.target.mode == "torchao":
            if not is_ours and (codes.tensor_scale is None or not codes.tensor_scale.ndim):
                self.tensors[name] = cast_of_torchao(x, recipe.format, codes.tensor_scale)
            return
        kept = self.tensors[name] = []
        if codes is not None:
            kept += [("codes", codes.data), ("scales", codes.scales)]
            kept += [] if codes.scale is None else [("tensor scale", codes.scale)]
            if recipe.format.is_native:
                kept.append(("blocked scales", recipe.ops.from_codes(codes, "native", 1).scales))
        if operand.scales is None:
            kept.append(("values", operand.data.float()))
        else:  # native: the codes, and their scales in another layout
            kept += [("codes", operand.data), ("blocked scales", operand.scales)]
        kept += [] if operand.tensor_scale is None else [("tensor scale", operand.tensor_scale)]


@torch.no_grad()
def _run(case: dict, target: Target) -> tuple[dict, dict, dict]:
    """Return the tensors of operands, products (bf16, or an error message), and ``_exact`` only for ``REFERENCE``."""
    recipe, device, others = get_recipe(case["recipe"]), target.device, {}
    rho = draws = source = ends = None
    mode = "reference" if target.mode == "torchao" else target.mode
    gemms = _WatchedGEMMs(recipe.key, mode, WHOLE, target=target)
    inputs = {name: _integers(name, **settings, device=device) for name, settings in case["inputs"].items()}
    x, w, dy, gain = (inputs.get(name) for name in _INPUTS)
    signs = torch.tensor(case["signs"], device=device) if recipe.needs_signs else None
    if recipe.needs_draws:
        draws, (key, step, microbatch, rank) = torch.tensor(case["draws"], device=device), case["draws"]
        others["random bits"] = [("words", rounding_words(*dy.shape, key, step, rank, microbatch, device=device))]
    if case["counts"]:
        # In every mode the groups of mode "native", so that all modes have the same operands.
        _, ends, source = make_groups(torch.tensor(case["counts"], device=device), len(x), TILE_ROWS)
        source, w = source[: int(ends[-1])], w.unflatten(0, (len(ends), -1))
        if draws is not None:  # each expert has a key of its own
            draws = draws.repeat(len(ends), 1)
            draws[:, 0] += torch.arange(len(ends), device=device)
    if case["norm"]:
        fprop, estimate = recipe.fprop, RMSEstimate.for_recipe(recipe.fprop, **case["norm"])
        x_operand, rho = fprop.ops.normalize(x, estimate, fprop, mode)
        codes = fprop.ops.normalize(x, estimate, fprop, mode, as_codes=True)[0] if mode == "reference" else None
        gemms.keep("fprop X", fprop, x_operand, codes, scale_rows(x, rho), fprop.error_for("input"))
        others["rho"] = [("fp32", rho)]
    else:
        x_operand = gemms.quantize_activation(x, source, ends)
    weights = gemms.quantize_weights([w], None if gain is None else gain[0])
    of_dy = gemms.quantize_gradients([dy], True, True, signs, [draws], source, ends)
    operands = {"fprop X": x_operand, "fprop W": weights[1], "dgrad dY": of_dy[0], "dgrad W": weights[0]}
    operands |= {"wgrad dY": of_dy[1], "wgrad X": gemms.quantize_along_tokens(x, rho, signs, source, ends)}
    products = _products(recipe, operands, ends, torch.bfloat16) if target.multiplies else {}
    tensors = gemms.tensors if target.mode == "torchao" else others | gemms.tensors
    return tensors, products, _exact(recipe, operands, ends) if target == REFERENCE else {}


def _integers(name: str, key: int, shape: list[int], device: str) -> torch.Tensor:
    """An input [rows, columns]: integers times a power of two. Every tile of 16 x 16 has another number of bits."""
    (rows, columns), (bits, exponent, dtype) = shape, _INPUTS[name]
    words = rounding_words(rows, columns, key, 0, 0, device=device)
    fewer = rounding_words(-(-rows // 16), -(-columns // 16), key, 1, 0, device=device) % bits
    fewer = fewer.repeat_interleave(16, 0).repeat_interleave(16, 1)[:rows, :columns]
    sizes = (words >> 1) % 2**bits >> fewer
    return (torch.where(words % 2 == 1, -sizes, sizes).double() * 2.0**exponent).to(dtype)


def _products(recipe: LinearRecipe, operands: dict[str, Operand], ends, dtype: torch.dtype) -> dict:
    found = {}
    for name, factors in _PRODUCTS.items():
        a, b = (operands[factor] for factor in factors)
        try:
            if ends is None:
                found[name] = getattr(recipe, name.split()[0]).ops.matmul(a, b, dtype)
            else:
                found[name] = (matmul_tokens if name == "wgrad dW" else matmul_rows)(a, b, ends, dtype)
        except Exception as error:  # PyTorch, cuBLAS and the driver raise what they like
            found[name] = f"failed: {one_line(error)}"
    return found


def _exact(recipe: LinearRecipe, operands: dict[str, Operand], ends) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Return product -> its fp64 elements, and the largest error of each."""
    wide, sizes = {}, {}
    for name, (data, _, scale) in operands.items():
        wide[name] = Operand(data.double() if scale is None else data.double() * scale.double().unsqueeze(-1))
        sizes[name] = Operand(wide[name].data.abs())
    of_sizes, found = _products(recipe, sizes, ends, torch.float64), {}
    for name, product in _products(recipe, wide, ends, torch.float64).items():
        of_sums = wide[_PRODUCTS[name][0]].data.shape[1] * _UNIT * of_sizes[name]
        found[name] = product, of_sums + _UNIT_OF_BF16 * (product.abs() + of_sums)
    return found


def _largest(bounds: torch.Tensor) -> float:
    return float(f"{bounds.max():.6g}")


def _bits(x: torch.Tensor) -> torch.Tensor:
    """The bits of x as integers, on the CPU."""
    x = x.cpu().contiguous()
    return x.view({1: torch.uint8, 4: torch.int32, 8: torch.int64}[x.element_size()])


def _hash(x: torch.Tensor) -> str:
    return sha256(_bits(x).numpy().tobytes()).hexdigest()[:32]


def _difference(name: str, x: torch.Tensor, wanted: str | None, base: dict[str, torch.Tensor]) -> str | None:
    """Say which element of x differs first, if ``base`` has the hash that is wanted."""
    if (found := _hash(x)) == wanted:
        return None
    right = base.get(name)
    if right is None or _hash(right) != wanted or right.shape != x.shape:
        return f"{name} {list(x.shape)} have the hash {found}, not {wanted}"
    x, right = _bits(x), _bits(right)
    at = tuple((x != right).nonzero()[0].tolist())
    got, right = (t[at].view(torch.float32).item() if t.dtype == torch.int32 else hex(t[at]) for t in (x, right))
    return f"{name} {list(at)} is {got}, not {right}"


def _checksum(content: dict) -> str:
    return sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
