"""What this machine supports, and the execution mode that follows."""

import functools
import os
from importlib.util import find_spec
from typing import Literal, NamedTuple, get_args

import torch

from mxtrain.errors import ConfigError, require_one_of
from mxtrain.formats.recipe import FORMATS, Format, LinearRecipe, Recipe

# Triton is installed on Linux only.
HAS_TRITON = find_spec("triton") is not None
# Triton's own reading of the variable. Importing Triton for it would take longer than the rest of this package.
_INTERPRETS_TRITON = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "y", "on")

Mode = Literal["auto", "native", "emulated", "reference", "fp8_merged"]
MODES = get_args(Mode)[1:]
MERGED = "fp8_merged"
"""Rounds codes once more (``mxtrain.formats.mx.merged``): operands of no other mode; "auto" never takes it"""
VALUE_MODES = ("emulated", "reference")
"""Modes whose operands are values"""


class ModeSupport(NamedTuple):
    """Whether an execution mode runs on a device type, and why."""

    mode: str
    available: bool
    reason: str


def default_device_type() -> str:
    """Return ``"cuda"`` if a CUDA device is visible, else ``"cpu"``."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def describe_modes(device_type: str | None = None) -> list[ModeSupport]:
    """Return for every execution mode, those of "auto" first, whether ``device_type`` runs it and why."""
    device_type = device_type or default_device_type()
    return [*_modes_of_auto(device_type), _merged_support(device_type)]


def _modes_of_auto(device_type: str) -> list[ModeSupport]:
    """The modes among which "auto" chooses, best first."""
    if device_type == "cpu":
        return [
            ModeSupport("native", False, "needs MX tensor cores (compute capability 10.0 or later); this is a CPU"),
            ModeSupport("emulated", True, "bf16 images of the operands, bf16 matrix products; slow on a CPU"),
            ModeSupport("reference", True, "plain PyTorch in float32"),
        ]
    if device_type != "cuda":
        raise ConfigError(f"device type {device_type!r} is not one of: 'cpu', 'cuda'")
    capability = torch.cuda.get_device_capability()
    name = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}"
    has_bf16 = capability >= (8, 0)
    return [
        _native_support(capability, name),
        ModeSupport(
            "emulated",
            has_bf16,
            f"bf16 tensor cores {'found' if has_bf16 else 'need compute capability 8.0 or later'} ({name})",
        ),
        ModeSupport("reference", True, "plain PyTorch in float32"),
    ]


def _merged_support(device_type: str) -> ModeSupport:
    if device_type == "cpu":
        return ModeSupport(MERGED, True, "FP8 codes with a scale per 128 elements, in plain PyTorch; slow")
    fault, name = fault_of(FORMATS["mxfp8"], MERGED), torch.cuda.get_device_name()
    found = "FP8 tensor cores with scales of 128 elements found"
    return ModeSupport(MERGED, fault is None, f"{fault or found} ({name})")


def _native_support(capability: tuple[int, int], name: str) -> ModeSupport:
    if capability < (10, 0):
        return ModeSupport("native", False, f"MX tensor cores need compute capability 10.0 or later ({name})")
    fault = fault_of_native_products() if capability >= (12, 0) else None
    if fault is not None:
        return ModeSupport("native", False, f"MX tensor cores found, but {fault} ({name})")
    # Tried here, because a compiled graph cannot try them.
    others = [f"; {fmt} multiplies values" for fmt in FORMATS.values() if fmt.gradients_of and fault_of(fmt)]
    return ModeSupport("native", True, f"MX tensor cores found{''.join(others)} ({name})")


def check_mode(mode: str, *recipes: LinearRecipe) -> None:
    """Raise ConfigError for an unknown mode, a mode that no device of this machine runs, or recipes that it refuses."""
    require_one_of("mode", mode, get_args(Mode))
    for fmt in (gemm.format for recipe in recipes for gemm in recipe.gemms):
        if mode == MERGED and fmt is not None and not fmt.merges:
            raise ConfigError(f"mode = {mode!r} merges E4M3 codes with power-of-two scales, which {fmt} does not have")
    device_types = dict.fromkeys((default_device_type(), "cpu"))
    if mode != "auto" and not any(mode in _usable(mode, device_type) for device_type in device_types):
        resolve_mode(mode)  # raises


def resolve_mode(mode: str, device_type: str | None = None) -> str:
    """Return the execution mode to use: ``mode`` itself, or for ``"auto"`` the best one for the device type.

    On a CPU, ``"auto"`` is ``"reference"``: emulation works there too, but is slower.

    Raises:
        ConfigError: for an unknown mode, or a mode that the device lacks.
    """
    require_one_of("mode", mode, get_args(Mode))
    device_type = device_type or default_device_type()
    available = _usable(mode, device_type)
    if mode == "auto":
        return "reference" if device_type == "cpu" else available[0]
    if mode not in available:
        usable = ", ".join(map(repr, available))
        raise ConfigError(
            f"mode = {mode!r} cannot run here: {mode_reason(mode, device_type)}; use 'auto' or one of: {usable}"
        )
    return mode


def mode_reason(mode: str, device_type: str) -> str:
    """Return why ``device_type`` runs ``mode``, or why not."""
    known = describe_modes(device_type) if mode == MERGED else _modes_of_auto(device_type)
    return next(support.reason for support in known if support.mode == mode)


def _available(device_type: str) -> list[str]:
    return [support.mode for support in _modes_of_auto(device_type) if support.available]


def _usable(mode: str, device_type: str) -> list[str]:
    """The modes of "auto" that are available, and ``mode`` if it is. Only who asks for "fp8_merged" pays its trial."""
    available = _available(device_type)
    is_other = mode == MERGED and mode not in available and _merged_support(device_type).available
    return [*available, mode] if is_other else available


_cached_mode = functools.cache(resolve_mode)


@torch.compiler.assume_constant_result
def mode_in_forward(mode: str, device_type: str) -> str:
    """``resolve_mode`` for the device of a layer's input: looked up once per process, a constant to ``torch.compile``.

    A layer keeps its mode as configured, because a model may move to another device after it was converted.
    """
    return _cached_mode(mode, device_type)


def operand_mode(recipe: Recipe, mode: str) -> str:
    """Return the mode of a GEMM's operands: ``mode``, or "emulated" if tensor cores do not take their codes."""
    formats = [fmt for fmt in (recipe.format, recipe.gradient_format) if fmt is not None]
    if mode == MERGED:
        return MERGED if formats and all(fmt.merges for fmt in formats) else "emulated"
    if mode == "native" and not all(fmt.is_native and not (fmt.gradients_of and fault_of(fmt)) for fmt in formats):
        return "emulated"
    return mode


def runs_kernels(mode: str, device_type: str) -> bool:
    """Return whether ``mode`` runs Triton kernels on this device type; plain PyTorch gives the same bits.

    Kernels run on CUDA devices, and on a CPU in Triton's interpreter (TRITON_INTERPRET=1: very slow, for tests).
    """
    has_kernels = device_type == "cuda" or (device_type == "cpu" and _INTERPRETS_TRITON)
    return HAS_TRITON and mode != "reference" and has_kernels


# The trial of the MX tensor cores: is the product of codes and scales the product of the values that they stand for?
# GPUs of compute capability 12.x have MX instructions of their own kind, and a PyTorch build may lack kernels for them.
TRIAL_DEVICE = "cuda"
# More than one of the tiles that block scales are laid out in, along every dimension.
ROWS, COLUMNS, DEPTH = 160, 144, 256
# Of the product as a whole. Rounding to bf16 costs 2^-9; scales in a wrong order cost far more than everything.
TOLERANCE = 2.0**-7


def fault_of_native_products() -> str | None:
    """Return what is wrong with small products of each format on this GPU, or None."""
    formats = [fmt for fmt in FORMATS.values() if fmt.is_native and not fmt.gradients_of]
    return next(filter(None, map(fault_of, formats)), None)


@functools.cache
def fault_of(fmt: Format, mode: str = "native") -> str | None:
    """Return what is wrong with small products of a format's codes on this GPU, or None. Tried once per process."""
    try:
        error = _relative_error(mode, fmt, FORMATS[fmt.gradients_of or fmt.name])
    except Exception as failure:  # PyTorch, cuBLAS and the driver raise what they like
        first_line = (str(failure).splitlines() or [""])[0]
        return f"a trial product in {fmt} failed with {type(failure).__name__}: {first_line}"
    return None if error <= TOLERANCE else f"a trial product in {fmt} has a relative error of {error:.2g}"


@torch.no_grad()
def _relative_error(mode: str, *formats: Format) -> float:
    generator = torch.Generator("cpu").manual_seed(0)
    # One side of a product of merged codes has tiles, as wgrad's input has, and whole ones.
    dims, columns = ((1, 0), 256) if mode == MERGED else ((1, 1), COLUMNS)
    codes = [fmt.ops.trial(_draw(rows, generator)) for fmt, rows in zip(formats, (ROWS, columns))]
    a, b = (fmt.ops.dequantize(each, torch.float32).double() for fmt, each in zip(formats, codes))
    want = a @ b.t()
    operands = (fmt.ops.from_codes(each, mode, dim) for fmt, each, dim in zip(formats, codes, dims))
    return float((formats[1].ops.matmul(*operands, torch.bfloat16) - want).norm() / want.norm())


def _draw(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Gaussian numbers [rows, DEPTH] with another magnitude for every block."""
    in_fp32 = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    blocks = torch.randn(rows, DEPTH // 16, 16, **in_fp32) * torch.randn(rows, DEPTH // 16, 1, **in_fp32).exp()
    return blocks.flatten(1).to(TRIAL_DEVICE)
