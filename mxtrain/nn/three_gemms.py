"""The three GEMMs of a linear layer, and the base class of the layers that run them.

X is [T, D] (tokens, input features), W is [N, D], dY is [T, N]:

    fprop   Y  = X  W^T     reduces over D
    dgrad   dX = dY W       reduces over N
    wgrad   dW = dY^T X     reduces over T

Each GEMM casts both operands as its own recipe says, in blocks along the axis that it reduces over. Every cast reads
high-precision values: an X quantized along its rows cannot be re-blocked along tokens exactly.

With the recipe "dequantized", dgrad and wgrad multiply dY, which is not rounded, by the decoded values of fprop's W and
X, as TransformerEngine does. No codes are saved: casts that round to nearest repeat.

After an MXNorm, X stands for X diag(rho) and W for W diag(gain).
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mxtrain.errors import ConfigError, require_positive_integer
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hardware import MERGED, VALUE_MODES, Mode, mode_in_forward, operand_mode
from mxtrain.formats.matrices import CastSpec, Operand, joined_values, values_dtype
from mxtrain.formats.mx.merged import why_not_merged
from mxtrain.formats.mxnorm import scale_rows
from mxtrain.formats.recipe import DEFAULT_RECIPE, LinearRecipe, Recipe
from mxtrain.formats.schedule import LayerState
from mxtrain.launch import from_key
from mxtrain.nn.recipe_module import RecipeModule
from mxtrain.nn.split import WHOLE, SplitMatrices

DTYPES = (torch.bfloat16, torch.float32)


class ReadyOperands(NamedTuple):
    """Weights of one linear or of several, times the gain if there is one, cast ahead for several forwards.

    Attributes:
        fprop: one operand for all weights, or one for each (see ``ThreeGEMMs.fprop``).
        dgrad: one operand for all weights.
        made_from: the weights and the norm's weight. A forward with other parameters (``torch.func.functional_call``)
            casts them itself.
    """

    fprop: tuple[Operand, ...]
    dgrad: Operand
    made_from: tuple[torch.Tensor | None, ...]

    def are_of(self, parameters: Iterable[torch.Tensor | None]) -> bool:
        """Return whether they were made from these tensors, not only from equal ones."""
        return all(parameter is other for parameter, other in zip(parameters, self.made_from, strict=True))


def constant_operand(xhat: Sequence[torch.Tensor | None], mode: str) -> Operand:
    """Return the operand of these results of an autograd function, for which no gradient is computed."""
    if mode == "reference":
        # Values may be a view here, which PyTorch 2.11 treats as differentiable where a compiled graph ends.
        # Kernels return no views, and with detach() PyTorch 2.11 would keep their results twice.
        xhat = [None if t is None else t.detach() for t in xhat]
    return Operand(*xhat)


def without_data(x: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor with the dtype and device of ``x`` and this shape, whose elements share one number in memory."""
    return x.new_zeros(()).expand(shape)


def weight_of(norm: nn.Module | None) -> torch.Tensor | None:
    """Return the parameter of an MXNorm before a layer, from which its gain follows; None without one."""
    return None if norm is None else norm.own_weight()


def version(x: torch.Tensor) -> int | None:
    """Return the number of writes to x so far; None in compiled graphs and for inference tensors, which have none.

    What was made from x before a write is out of date.
    """
    return None if torch.compiler.is_compiling() or x.is_inference() else x._version


@dataclass(frozen=True)
class ThreeGEMMs:
    """The GEMMs of a layer with this recipe, in this execution mode, on matrices that may be split over processes.

    Several layers with the same X can be one GEMM each way: their weights ``ws`` [N_i, D] one below the other are W
    [N, D], N = sum N_i, and their output gradients ``dys`` side by side are dY [T, N]. If ``runs_wgrad`` is False,
    weights and gain get no gradient. With ``weights_are_cast``, W holds the values of codes for fprop and dgrad, times
    the gain if there is one (``mxtrain.parallel.fsdp_gather``).
    """

    recipe_key: str
    mode: str
    split: SplitMatrices
    runs_wgrad: bool = True
    weights_are_cast: bool = False

    @property
    def recipe(self) -> LinearRecipe:
        """The layer's recipe."""
        return from_key(self.recipe_key)

    def _cast(self, parts: Sequence[torch.Tensor], recipes: dict[int, Recipe], spec: CastSpec) -> dict[int, Operand]:
        """Cast a matrix along each dimension by that dimension's recipe. One read serves both if they are equal."""
        dims_of: dict[Recipe, tuple[int, ...]] = {}
        for dim, recipe in recipes.items():
            dims_of[recipe] = (*dims_of.get(recipe, ()), dim)
        found = {}
        for recipe, dims in dims_of.items():
            found |= recipe.ops.cast(parts, recipe, self.mode, dims, spec)
        return found

    def quantize_activation(
        self, x: torch.Tensor, source: torch.Tensor | None = None, ends: torch.Tensor | None = None
    ) -> Operand:
        """X as fprop's operand [T, D], where no MXNorm has made it.

        Args:
            source: int64 [T]: X's row i is row source[i] of ``x``, zero if that is negative. None: X is ``x``.
            ends: int32 [G], the ends of groups of X's rows, which have tensor scales of their own. None: X has one.
        """
        return self._cast([x], {1: self.recipe.fprop}, CastSpec(group=self.split.x, source=source, ends=ends))[1]

    def quantize_along_tokens(
        self,
        x: torch.Tensor,
        rho: torch.Tensor | None = None,
        signs: torch.Tensor | None = None,
        source: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
        estimate: RMSEstimate | None = None,
    ) -> Operand:
        """X as wgrad's operand [D, T]; with ``rho`` [T], or [T, groups] of features, each row or group times its rho.

        Args:
            signs: packed signs of the Hadamard transform, int64 []; None if the recipe has no transform.
            source, ends: as for ``quantize_activation``.
            estimate: of the norm that ``rho`` comes from.
        """
        groups = 1
        if rho is not None and rho.ndim == 2:
            groups, x, rho = rho.shape[1], scale_rows(x, rho), None
        spec = CastSpec(row_factor=rho, signs=signs, group=self.split.x, source=source, ends=ends)
        if not self.recipe.wgrad.dequantizes:
            return self._cast([x], {0: self.recipe.wgrad}, spec)[0]
        fprop = self.recipe.fprop
        if estimate is not None:
            spec = spec._replace(tensor_scale=fprop.ops.static_scale(x.shape[-1] // groups, estimate, fprop))
        return Operand(fprop.ops.decoded([x], fprop, self.mode, spec).t())

    def quantize_weights(
        self, ws: Sequence[torch.Tensor], gain: torch.Tensor | None, dims: tuple[int, ...] = (1, 0)
    ) -> dict[int, Operand]:
        """W, or W diag(gain), as the operands of fprop [N, D] (1) and of dgrad [D, N] (0).

        Args:
            ws: W_i [N_i, D]. Or stacked experts [E, N_i, D], only one W with tensor scales: every expert's W_i lie one
                below the other. N_i is whole blocks, so that no block holds two experts. The operands are [E N, D] and
                [D, E N].
        """
        experts = ws[0].shape[0] if ws[0].ndim == 3 else 1
        fprop, dgrad = self.recipe.fprop, self.recipe.dgrad
        recipes = {dim: fprop if dim else dgrad for dim in dims if dim or not dgrad.dequantizes}
        spec = CastSpec("weight", column_factor=gain, group=self.split.w, experts=experts)
        parts = [w.flatten(0, -2) for w in ws]
        if self.weights_are_cast and operand_mode(fprop, self.mode) in VALUE_MODES:
            values = joined_values(parts, experts, values_dtype(self.mode))
            return {dim: Operand(values if dim else values.t()) for dim in dims}
        operands = self._cast(parts, recipes, spec)
        if 0 in dims and dgrad.dequantizes:
            of_fprop = operands.get(1)
            # An operand of values alone holds the decoded ones.
            is_decoded = of_fprop is not None and of_fprop.scales is None and of_fprop.tensor_scale is None
            values = of_fprop.data if is_decoded else fprop.ops.decoded(parts, fprop, self.mode, spec)
            operands[0] = Operand(values.t())
        return operands

    def quantize_gradients(
        self,
        dys: Sequence[torch.Tensor],
        for_dgrad: bool,
        for_wgrad: bool,
        signs: torch.Tensor | None,
        draws: Sequence[torch.Tensor | None],
        source: torch.Tensor | None = None,
        ends: torch.Tensor | None = None,
    ) -> tuple[Operand | None, Operand | None]:
        """dY as the operands of dgrad [T, N] and wgrad [N, T]; None for an operand that is not wanted.

        Args:
            signs: as for ``quantize_along_tokens``.
            draws: for each part what stochastic rounding derives its random bits from
                (``RecipeModule.draws``), with ``ends`` for each group; None if the recipe rounds to nearest.
            source, ends: as for ``quantize_activation``.
        """
        recipes = {1: self.recipe.dgrad.of_gradients} if for_dgrad else {}
        if for_wgrad:
            recipes[0] = self.recipe.wgrad.of_gradients
        spec = CastSpec("gradient", 1, signs=signs, draws=draws, group=self.split.dy, source=source, ends=ends)
        found = self._cast(dys, recipes, spec)
        return found.get(1), found.get(0)

    def quantize_ahead(self, ws: Sequence[torch.Tensor], norm: nn.Module | None, joined: bool = True) -> ReadyOperands:
        """W, or W diag(gain) behind an MXNorm, as the operands of fprop and dgrad; ``joined`` as for ``fprop``."""
        weight = weight_of(norm)
        gain = None if norm is None else norm.gain_of(weight)
        if self.mode not in VALUE_MODES and not joined:  # scales of codes are not sliced
            operands, fprop = self.quantize_weights(ws, gain, (0,)), self._for_fprop(ws, gain, False)
        else:
            operands = self.quantize_weights(ws, gain)
            heights = [w.shape[0] for w in ws]
            fprop = (operands[1],) if joined else map(Operand, operands[1].data.split(heights))
        return ReadyOperands(tuple(fprop), operands[0], (*ws, weight))

    def _for_fprop(self, ws, gain, joined: bool) -> Iterator[Operand]:
        for part in (ws,) if joined else ((w,) for w in ws):
            yield self.quantize_weights(part, gain, (1,))[1]

    def fprop(
        self,
        x: Operand,
        ws: Sequence[torch.Tensor],
        out_dtype: torch.dtype,
        gain: torch.Tensor | None = None,
        ready: ReadyOperands | None = None,
        joined: bool = True,
    ) -> tuple[torch.Tensor, ...]:
        """Y_i [T, N_i] of every weight, from X quantized along D. ``ready`` takes the place of W and gain.

        Args:
            joined: compute all of Y as one GEMM. It stays in memory as long as any Y_i is needed.
        """
        operands = self._for_fprop(ws, gain, joined) if ready is None else ready.fprop
        ys = tuple(self.recipe.fprop.ops.matmul(x, w, out_dtype) for w in operands)
        if len(ys) == len(ws):
            return ys
        # Not views for autograd, which would forbid writes to them.
        return ys[0].unsafe_split_with_sizes([w.shape[0] for w in ws], 1)

    def dgrad(
        self,
        dy: Operand,
        ws: Sequence[torch.Tensor],
        out_dtype: torch.dtype,
        gain: torch.Tensor | None = None,
        ready: ReadyOperands | None = None,
    ) -> torch.Tensor:
        """dX [T, D] from dY quantized along N: the sum over the layers. ``ready`` takes the place of W and gain."""
        w = self.quantize_weights(ws, gain, (0,))[0] if ready is None else ready.dgrad
        return self.recipe.dgrad.ops.matmul(dy, w, out_dtype)

    def wgrad(self, dy: Operand, x: Operand, out_dtype: torch.dtype) -> torch.Tensor:
        """dW [N, D] from dY and X quantized along T."""
        return self.recipe.wgrad.ops.matmul(dy, x, out_dtype)


def compute_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which ``nn.Linear`` would compute with ``x``: autocast's if it is on, else that of ``x``.

    Autocast leaves float64 alone.
    """
    device_type = x.device.type
    # Asked for its size, float64 costs a compiled graph no guard.
    is_cast = torch.is_autocast_enabled(device_type) and x.dtype.itemsize < 8
    return torch.get_autocast_dtype(device_type) if is_cast else x.dtype


class QuantizedLayer(RecipeModule):
    """A layer of quantized products, with one recipe and one execution mode for all of them.

    Under tensor parallelism, ``split`` says which matrices are split over processes. The weights are then DTensors, and
    every process multiplies its part.
    """

    split: SplitMatrices = WHOLE
    is_plain = False
    """Compute ``torch.nn.Linear`` in high precision: behind a plain norm only"""
    runs_wgrad = True
    gathers_codes = False
    """Whether FSDP gives the weights as values of codes, times the gain (``mxtrain.parallel.fsdp_gather``)"""

    def __getstate__(self) -> dict:
        # Nothing would renew the operands of a copy.
        return {**self.__dict__, "ready": None}

    def gemms(self, device: torch.device) -> ThreeGEMMs:
        """Return the GEMMs in this layer's mode, or in the mode that "auto" stands for on ``device``.

        Raises:
            ConfigError: for a mode that the device lacks.
        """
        mode = mode_in_forward(self.mode, device.type)
        return ThreeGEMMs(self.recipe.key, mode, self.split, self.runs_wgrad, self.gathers_codes)

    @property
    def layer_state(self) -> LayerState:
        """What this layer computes with now."""
        return LayerState(self.recipe, is_plain=self.is_plain)

    @property
    def recipes(self) -> tuple[LinearRecipe, ...]:
        """Every recipe that this layer has in the run."""
        if self.timeline is None:
            return (self.recipe,)
        return tuple(state.recipe for state in self.timeline.all_states if not state.is_plain)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe}, mode={self.mode}".removeprefix(", ")


class QuantizedLinear(QuantizedLayer, nn.Linear):
    """A linear layer with a recipe and an execution mode. Subclasses define ``forward``.

    Both feature counts must be multiples of the recipe's block sizes: fprop reduces over the input features and
    dgrad over the output features.
    """

    fed_by: tuple[nn.Module, ...] | None = ()
    """The MXNorm that feeds this layer, if any; None if nobody knows (``mxtrain.nn.ready_weights``)"""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        recipe: str | LinearRecipe = DEFAULT_RECIPE,
        mode: Mode = "auto",
        **factory_kwargs,
    ):
        self._set_recipe(recipe, mode)
        check_features(in_features, out_features, self.recipe)
        if mode == MERGED and (reason := why_not_merged(in_features, out_features)):
            raise ConfigError(f"mode = {mode!r} cannot run this linear: {reason}; use mode 'emulated'")
        super().__init__(in_features, out_features, bias, **factory_kwargs)
        # Set from the start, because torch.compile would compile again when the attribute appears.
        self.ready: ReadyOperands | None = None
        self.runs_wgrad = True
        self.set_seed(0, "")

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, *, recipe: str | LinearRecipe = DEFAULT_RECIPE, mode: Mode = "auto"
    ) -> Self:
        """Return the same layer, sharing the parameters of ``linear`` (which may be on the meta device)."""
        features, has_bias = (linear.in_features, linear.out_features), linear.bias is not None
        new = cls(*features, has_bias, recipe=recipe, mode=mode, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def ready_with(self, norm_weight: torch.Tensor | None) -> ReadyOperands | None:
        """Return the operands of ``mxtrain.nn.ready_weights`` if they are of this layer's and this norm's weight.

        It is an argument of its own in autograd functions: Dynamo finds no tensors in a ``ThreeGEMMs``.
        """
        if self.ready is None or not self.ready.are_of((self.weight, norm_weight)):
            return None
        return self.ready

    def parts(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return weight and bias; if the matrices are split, this process's parts."""
        if self.split == WHOLE:
            return self.weight, self.bias
        own = (p.to_local() if isinstance(p, DTensor) else p for p in (self.weight, self.bias))
        return tuple(own)


def check_features(in_features: int, out_features: int, recipe: LinearRecipe) -> None:
    """Raise ConfigError unless both are multiples of the block sizes of fprop and of every GEMM that is quantized."""
    require_positive_integer("in_features", in_features)
    require_positive_integer("out_features", out_features)
    for of_gemm in recipe.gemms:
        if of_gemm.format is None and of_gemm != recipe.fprop:
            continue
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value % of_gemm.block_size:
                raise ConfigError(
                    f"{name} = {value} is not a multiple of the block size {of_gemm.block_size} "
                    f"of recipe {of_gemm.name!r}"
                )


def check_input(x: torch.Tensor, features: int, weight: torch.Tensor | None, recipe: LinearRecipe, mode: str) -> None:
    """Raise ValueError unless a layer with this weight, recipe and mode takes x [..., features].

    Raises ConfigError for DTensors, unless nothing is quantized.
    """
    if any(isinstance(tensor, DTensor) for tensor in (x, weight)) and recipe.quantizes:
        raise ConfigError(
            "a quantized layer got a DTensor, and PyTorch's tensor parallelism (parallelize_module) cannot split its "
            "casts; name the layer in filter_fqns, or train with 'mxtrain train', which splits them"
        )
    if x.ndim == 0 or x.shape[-1] != features:
        raise ValueError(f"x has shape {tuple(x.shape)}; its last dimension must be {features}")
    check_dtype("x", x.dtype, recipe, mode)
    if weight is not None:
        check_dtype("weight", weight.dtype, recipe, mode)
        if weight.device != x.device:
            raise ValueError(f"weight is on {weight.device}; move it to {x.device}, where x is")
        if (x.dtype in DTYPES) != (weight.dtype in DTYPES):
            raise ValueError(f"x is {x.dtype} and weight is {weight.dtype}; both or none must be float64")


def check_dtype(name: str, dtype: torch.dtype, recipe: LinearRecipe, mode: str) -> None:
    """Raise ValueError for a dtype that would be rounded before its cast. float64 needs GEMMs in float64."""
    if dtype in DTYPES:
        return
    if dtype != torch.float64:
        raise ValueError(f"{name} is {dtype}; it must be bfloat16 or float32")
    if mode != "reference" or recipe.quantizes:
        raise ValueError(
            f"{name} is {dtype} with recipe {recipe.name!r} in mode {mode!r}; it must be bfloat16 or float32, because "
            "float64 needs recipe 'unquantized' in mode 'reference'"
        )
