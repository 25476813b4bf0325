"""What a format is, without PyTorch, so that the command line can check settings before it loads PyTorch."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from typing import Literal, get_args

ScaleRounding = Literal["rceil", "floor"]
SCALE_ROUNDINGS = get_args(ScaleRounding)
TensorScale = Literal["static", "dynamic"]
TENSOR_SCALES = get_args(TensorScale)
LONGEST_BLOCK = 32
"""So many rows are whole blocks in every format."""


@dataclass(frozen=True)
class Layout:
    """How compressed-tensors stores a format.

    Attributes:
        compression: ``format`` in compressed-tensors' config.
        weights: ``QuantizationArgs`` of the weights.
        activations: ``QuantizationArgs`` of the inputs; None if they stay in high precision.
    """

    compression: str
    weights: dict
    activations: dict | None


def quantization_args(bits: int, block_size: int, strategy: str, scale_dtype: str, dynamic: bool = False) -> dict:
    """Return compressed-tensors' ``QuantizationArgs``."""
    return {
        "num_bits": bits,
        "type": "float",
        "symmetric": True,
        "strategy": strategy,
        "group_size": block_size,
        "scale_dtype": scale_dtype,
        "dynamic": dynamic,
    }


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Format:
    """A format in which ``block_size`` consecutive elements share one scale (OCP Microscaling Formats v1.0).

    As declared here, scales are powers of two (E8M0), plain PyTorch computes, and matrix products multiply the values
    in bf16. So a new format of this kind is a few numbers; ``mxtrain.formats.register_format`` makes it known. A format
    with kernels or scales of its own names its subclass of ``FormatOps``.

    Attributes:
        name: the usual name, in lower case.
        block_size: elements per scale, along the reduction axis of the GEMM; divides ``LONGEST_BLOCK``.
        element_max: largest finite element magnitude.
        element_max_exponent: floor(log2(element_max)), the exponent that FLOOR scale rounding targets.
        element_bits: bits of an element; a scale has 8.
        element: name of PyTorch's dtype of the codes.
        settings: the settings of a ``Recipe`` that change the cast -> their values.
        has_tensor_scale: whether a matrix has a scale of its own beside those of its blocks. Then its codes depend on
            all of its rows: several matrices are not one native operand, and experts and other processes cast rows
            for themselves.
        is_native: whether MX tensor cores multiply codes. Else mode "native" multiplies values.
        layout: how an export stores codes and scales; None for a format that cannot be exported.
        implementation: where the subclass of ``FormatOps`` is: "module:class".
    """

    name: str
    block_size: int
    element_max: float
    element_max_exponent: int
    element_bits: int
    element: str
    settings: Mapping[str, tuple] = field(default_factory=lambda: {"scale_rounding": SCALE_ROUNDINGS})
    has_tensor_scale: bool = False
    is_native: bool = False
    layout: Layout | None = None
    implementation: str = "mxtrain.formats.mx:MXOps"

    @property
    def bytes_per_element(self) -> float:
        """Bytes of codes and block scales per element."""
        return self.element_bits / 8 + 1 / self.block_size

    @cached_property
    def ops(self):
        """What computes with this format, a ``mxtrain.formats.ops.FormatOps``."""
        module, _, name = self.implementation.partition(":")
        return getattr(import_module(module), name)(self)

    def __str__(self) -> str:
        return self.name.upper()

    def __repr__(self) -> str:
        return f"Format({self.name!r})"

    def __reduce__(self):
        return format_named, (self.name,)  # copies are the same object


FORMATS: dict[str, Format] = {}
"""By name; ``mxtrain.formats.register_format`` adds to them"""


def format_named(name: str) -> Format:
    """Return the format that is registered under this name."""
    return FORMATS[name]


_NUMBERS = {"block_size": LONGEST_BLOCK, "element_max": math.inf, "element_max_exponent": 0, "element_bits": 16}
HIGH_PRECISION = Format(
    name="high precision", **_NUMBERS, element="bfloat16", implementation="mxtrain.formats.ops:FormatOps"
)
"""What computes for recipes without a format: operands keep their values"""
