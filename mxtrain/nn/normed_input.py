"""What an MXNorm hands to its linears. It takes a tensor's place but is not one; only linears accept it."""

from typing import NamedTuple

import torch

from mxtrain.errors import ConfigError
from mxtrain.formats.matrices import CastSpec, Codes, Operand
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.formats.recipe import Format, Recipe, format_named
from mxtrain.launch import from_key
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.launch.pytorch import tree_leaves
from mxtrain.nn.gathered_norm import GatheredColumns
from mxtrain.nn.group import GroupCall
from mxtrain.nn.recipe_module import RecipeModule


def pack(codes: Codes) -> torch.Tensor:
    """Codes [R, D], or [R, D / 2] of 4 bits, and scales [R, D / block] -> uint8: their bytes side by side."""
    return torch.cat([codes.data.view(torch.uint8), codes.scales.view(torch.uint8)], 1)


def unpack(packed: torch.Tensor, fmt: Format, dtype: torch.dtype) -> torch.Tensor:
    """Bytes from ``pack`` -> values [R, D] in ``dtype``. Rows of zero bytes are zeros."""
    of_block = fmt.block_size * fmt.element_bits // 8
    data, scales = packed.tensor_split([packed.shape[1] // (of_block + 1) * of_block], 1)
    return fmt.ops.dequantize(Codes(data.view(getattr(torch, fmt.element)), scales.view(torch.float8_e8m0fnu)), dtype)


@untraced
class _RowValues(torch.autograd.Function):
    """h [R, D] and packed rows -> their values [R, D] in the dtype of h, with h's gradient."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, packed: torch.Tensor, format: str):
        ctx.set_materialize_grads(False)
        return unpack(packed, format_named(format), h.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dx: torch.Tensor):
        return dx, None, None


class RoutedRows(NamedTuple):
    """Rows of an MXNorm's result for experts, as expert parallelism sends them: codes and scales, joined as bytes.

    A row of D 8-bit elements in blocks of 32 is D + D / 32 bytes, where bf16 values are 2 D. Bytes also pass FSDP,
    which casts floating inputs of experts, float8 among them. A tuple, because FSDP's hooks find tensors in tuples.

    Attributes:
        h: stands for the rows' values [T, D], with the same shape and dtype but without data; takes their gradient.
        packed: uint8 [T, bytes of a row] (``pack``).
        format: name of their format.
        index: int64 [R]: the token of every row to be sent. None for rows that are in the order of experts.
    """

    h: torch.Tensor
    packed: torch.Tensor
    format: str
    index: torch.Tensor | None = None

    def values(self) -> torch.Tensor:
        """The rows [T, D] in the dtype of h."""
        return _RowValues.apply(self.h, self.packed, self.format)


LOOKS = ("shape", "size", "ndim", "dim", "numel", "device")
"""Attributes and methods that a ``NormedInput`` shares with the plain norm's result, with equal answers.

``dtype`` is left out: under autocast, or with an fp32 weight, the result of a plain norm may have another dtype than x,
which depends on the norm's class and on PyTorch's release. ``len`` counts the fields of the tuple.
"""


@untraced
class _Values(torch.autograd.Function):
    """h [T, D] and an operand of xhat -> its values [T, D] in the dtype of h. The gradient of h is dL/dxhat."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, data: torch.Tensor, scales, tensor_scale, recipe_key: str):
        ctx.set_materialize_grads(False)
        if scales is not None:
            ops = from_key(recipe_key).ops
            data = ops.dequantize(ops.codes_of(Operand(data, scales, tensor_scale)), h.dtype)
        return data.to(h.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dxhat: torch.Tensor):
        return dxhat, None, None, None, None


class NormedInput(NamedTuple):
    """MXNorm's result, for the linears that it feeds. T is the product of the leading dimensions of x.

    A tuple, because PyTorch finds tensors in tuples: for FSDP, and where a compiled graph ends.
    ``LOOKS`` lists what a model may ask the tuple, ``_REFUSED`` what a model must not do with it. PyTorch itself needs
    iteration and ``len``, so these stay. The norm comes first, so that a model that iterates fails at the first item.
    Full backward hooks on the norm and its linears see other gradients than those of a plain norm's result, or None.

    ``torch.is_tensor`` and ``isinstance`` say that the result is no tensor, which the survey of a conversion cannot
    foresee. A model that then uses the result in another way fails; one that goes on without the result does not.

    Attributes:
        made_by: the MXNorm.
        h: stands for x [..., D], with the same shape and dtype but without data; its gradient is dL/dxhat.
        x: the values that wgrad casts, without a gradient: x as rows [T, D]; with ``gathered``, this process's shard
            of the sequences.
        xhat: the normalized rows [T, D] as fprop's operand, without a gradient.
        rho: inverse RMS estimate, fp32 [T], or [T, groups]; with ``gathered``, of this process's tokens.
        weight: the norm's parameter [D], from which ``gain`` follows; None for a norm without a weight.
        signs: signs of the Hadamard transform in wgrad (see ``mxtrain.nn.recipe_module``); None without a transform.
            The linears share them, so that compiled linears share the transform and the cast of xhat.
        recipe, mode: recipe of fprop and mode that made ``xhat``; the mode is never "auto".
        gathered: gathers wgrad's operand, where codes are sent instead of x.
        call: this forward of linears that are one GEMM each way (``mxtrain.nn.group``); None for single linears.
        feeds_mixture: whether a mixture of experts takes the result: tokens as rows, and rows in the order of experts.
        sends_codes: whether experts on other processes take these rows as codes, where fprop's format
            has no tensor scale.
    """

    made_by: RecipeModule
    h: torch.Tensor
    x: torch.Tensor
    xhat: Operand
    rho: torch.Tensor
    weight: torch.Tensor | None
    signs: torch.Tensor | None
    recipe: Recipe
    mode: str
    gathered: GatheredColumns | None = None
    call: GroupCall | None = None
    feeds_mixture: bool = False
    sends_codes: bool = False

    @property
    def gain(self) -> torch.Tensor | None:
        """gamma [D], which the linears fold into their weights."""
        return self.made_by.gain_of(self.weight)

    @property
    def shape(self) -> torch.Size:
        """Shape of x. Attention modules read their batch and sequence sizes from it."""
        return self.h.shape

    def size(self, *args, **kwargs) -> torch.Size | int:
        return self.h.size(*args, **kwargs)

    @property
    def ndim(self) -> int:
        return self.h.ndim

    def dim(self) -> int:
        return self.h.dim()

    def numel(self) -> int:
        return self.h.numel()

    @property
    def device(self) -> torch.device:
        return self.h.device

    def to(self, dtype: torch.dtype) -> "NormedInput":
        """The same rows, for a model that casts to the dtype that they have."""
        if dtype != self.h.dtype:
            raise TypeError(_refusal(self, f"of {self.h.dtype} cannot become {dtype}"))
        return self

    def view(self, *shape: int) -> "NormedInput":
        """The same rows under other leading dimensions, for a mixture of experts."""
        if not self.feeds_mixture:
            raise AttributeError(_refusal(self, "has no 'view'"))
        return self._replace(h=self.h.view(*shape))

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of x, for a mixture of experts."""
        if not self.feeds_mixture:
            raise AttributeError(_refusal(self, "has no 'dtype'"))
        return self.h.dtype

    def __getitem__(self, index: torch.Tensor) -> torch.Tensor | RoutedRows:
        """Rows of xhat for experts, in the dtype of x: the values of the operand, with the gradient dL/dxhat.

        Cast along the rows again, every value stays: the scale of a block is the same, or half of it. So codes that
        are sent are made from values, too. A mixture that multiplies rows by scores gets them before the cast: the
        experts then cast the products, and nothing is cast twice.
        """
        if not self.feeds_mixture:
            raise TypeError(_refusal(self, "has no __getitem__"))
        if self.made_by.scores_first:
            return _Values.apply(self.h, *Operand(scale_rows(self.x, self.rho)), self.recipe.key)[index]
        if self.sends_codes and self.recipe.sends_rows:
            return RoutedRows(self.h, pack(self._codes()), self.recipe.format.name, index)
        return _Values.apply(self.h, *self.xhat, self.recipe.key)[index]

    def _codes(self) -> Codes:
        ops = self.recipe.ops
        if self.xhat.scales is None:
            return ops.cast([self.xhat.data], self.recipe, self.mode, (1,), CastSpec(as_codes=True))[1]
        return ops.codes_of(self.xhat)

    def __getattr__(self, name: str):
        raise AttributeError(_refusal(self, f"has no {name!r}"))

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        values = tree_leaves((args, kwargs), is_leaf=lambda value: isinstance(value, cls))
        normed = next(value for value in values if isinstance(value, cls))
        if function is torch.zeros_like and normed.feeds_mixture:  # for the sum of what experts return
            return torch.zeros_like(normed.h)
        raise TypeError(_refusal(normed, f"cannot be an argument of {torch.overrides.resolve_name(function)}"))

    def __repr__(self) -> str:
        return f"<the result of {_name(self)}, {list(self.shape)}, for linears only>"


# A tuple has no other operators, so Python or PyTorch refuses them.
_REFUSED = "contains reversed bool array eq ne lt le gt ge add radd mul rmul".split()


def _name(normed: NormedInput) -> str:
    # Dynamo asks an empty tuple of this class for its attributes.
    norm = next(iter(normed), None)
    return f"MXNorm {norm.fqn!r}" if norm is not None and norm.fqn else "an MXNorm"


def _refusal(normed: NormedInput, what: str) -> str:
    return (
        f"the result of {_name(normed)} {what}, because it is no tensor and only linears can use it: name the norm "
        "in filter_fqns, or the linears that get adapters such as LoRA, or convert the model with 'mx_linear'"
    )


def _refuse(name: str):
    def refuse(self, *_):
        raise TypeError(_refusal(self, f"has no {name}"))

    return refuse


for _method in (*(f"__{name}__" for name in _REFUSED), "index", "count"):
    setattr(NormedInput, _method, _refuse(_method))


def check_norm_result(normed) -> None:
    """Require an MXNorm's result that gives a linear its gradients.

    In a compiled graph only class and dtype are checked: Dynamo cannot trace the rest.

    Raises:
        TypeError: ``normed`` is not the result of an MXNorm.
        ConfigError: FSDP between the norm and the linear has made the result useless.
    """
    if not isinstance(normed, NormedInput):
        raise TypeError(f"MXNormLinear takes the result of an MXNorm, not {type(normed).__name__}")
    if normed.rho.dtype not in (torch.float32, torch.float64):
        raise ConfigError(
            f"the result of an MXNorm was cast to {normed.rho.dtype} before its linears; set cast_forward_inputs=False "
            "in FSDP's mixed precision of modules between the norm and its linears"
        )
    weight = normed.weight
    if weight is not None and not torch.compiler.is_compiling() and weight.untyped_storage().size() == 0:
        raise ConfigError(
            "the gain of an MXNorm was freed before its linears; let FSDP shard the norm together with its linears, or "
            "a module that holds them all"
        )
