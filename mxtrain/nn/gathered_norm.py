"""MXNorm under tensor parallelism: a shard of the sequences goes in, and xhat of whole sequences comes out.

X is [B, S, D], and a process of P has the shard [B, S / P, D]. X [T, D] is one sequence. The linears after a norm need
all tokens, so one gather per norm serves all its linears. What is sent is a choice of ``SplitSequences.gather``:

    "high_precision"    x, before the norm. The linears save the whole x for wgrad.
    "quantized"         codes and scales of xhat along D, after the norm, for fprop; and in the backward codes and
                        scales along tokens, for wgrad. Every process saves its own x only, which its norm saves anyway.
    "auto"              whichever sends fewer bytes

Bytes per element of X, with activation checkpointing, which runs a forward twice, in parentheses:

    bf16    2.0 (4.0)        MXFP8    2 x 1.03 (3 x 1.03)        NVFP4    2 x 0.5625 (3 x 0.5625)

Operands of the GEMMs are equal bit for bit. Rows are whole on every process. Blocks along tokens are those of whole
sequences, because "quantized" needs shards of whole blocks. NVFP4's tensor scales come from the maxima of all shards.
rho is not sent: after the casts only the norm's backward reads it, each process that of its own tokens.
"""

from dataclasses import dataclass

import torch

from mxtrain.formats.collectives import gather_codes, gather_tokens, sum_parts, sum_tokens
from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.hardware import operand_mode
from mxtrain.formats.matrices import CastSpec, Operand, values_dtype
from mxtrain.formats.recipe import LONGEST_BLOCK, LinearRecipe, Recipe
from mxtrain.launch import from_key
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.split import SplitSequences
from mxtrain.nn.three_gemms import constant_operand, without_data
from mxtrain.norms.mxnorm import norm_backward


def normalize_shard(
    x: torch.Tensor, estimate: RMSEstimate, recipe: LinearRecipe, mode: str, split: SplitSequences
) -> "tuple[torch.Tensor, torch.Tensor, Operand, torch.Tensor, GatheredColumns | None]":
    """Normalize a shard x [B, S / P, D] or [T / P, D] and gather, in the order that ``split.gather`` says.

    Returns h, x, xhat, rho and gathered, as in ``mxtrain.nn.normed_input.NormedInput``. Raises ValueError as
    ``gathers_codes`` does.
    """
    columns, shape, x = None, x.shape, as_sequences(x)
    settings = (estimate.key, recipe.fprop.key, mode, split.key, torch.compiler.is_compiling())
    if gathers_codes(x, recipe, mode, split):
        for_wgrad, columns = x.detach(), GatheredColumns(split.key, {})
        h, rho, *xhat = NormThenGather.apply(x, *settings, columns.for_function())
    else:
        h, for_wgrad, rho, *xhat = GatherThenNorm.apply(x, *settings)
    h = h.view(*shape[:-2], split.processes * shape[-2], shape[-1])
    return h, for_wgrad, constant_operand(xhat, mode), rho, columns


def as_sequences(x: torch.Tensor) -> torch.Tensor:
    """[T, D] -> [1, T, D]; [B, S, D] as it is."""
    return x if x.ndim == 3 else x[None]


def gathers_codes(x: torch.Tensor, recipe: LinearRecipe, mode: str, split: SplitSequences) -> bool:
    """Return whether a norm with this recipe sends codes of its shard x [B, S / P, D], not x itself.

    Raises:
        ValueError: codes are asked for, and the shard is not whole blocks of tokens.
    """
    whole_blocks = x.shape[1] % LONGEST_BLOCK == 0
    if split.gather == "quantized" and not whole_blocks:
        raise ValueError(
            f"x has {x.shape[1]} tokens on each of {split.processes} processes, and gather = 'quantized' needs whole "
            f"blocks of {LONGEST_BLOCK}; set it to 'auto'"
        )
    if split.gather != "auto":
        return split.gather == "quantized"
    fprop, wgrad = (_bytes_per_element(gemm, mode) for gemm in (recipe.fprop, recipe.input_of_wgrad[0]))
    return whole_blocks and split.forwards * fprop + wgrad < split.forwards * x.element_size()


def _bytes_per_element(recipe: Recipe, mode: str) -> float:
    return values_dtype(mode).itemsize if recipe.format is None else recipe.format.bytes_per_element


@untraced
class GatherThenNorm(torch.autograd.Function):
    """A shard x [B, S / P, D] -> h and X [T, D], T = B S, rho [T] and the tensors of xhat's operand.

    The shards are gathered before the norm: its kernel must read all rows for the cast anyway. Every linear returns its
    process's part of dL/dxhat, the gradient of h. The sum of the parts goes back to the shards, whose norm backward is
    local.
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, estimate_key: str, recipe_key: str, mode: str, split_key: str, is_compiled: bool):
        split = from_key(split_key)
        h, whole, rho, *xhat = normalize_whole(ctx, x, estimate_key, recipe_key, mode, split)
        own = rho.view(x.shape[0], split.processes, x.shape[1])[:, split.rank].reshape(-1)
        ctx.save_for_backward(x, own)
        ctx.mode, ctx.split, ctx.is_compiled = mode, split, is_compiled
        return h, whole, rho, *xhat

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dxhat: torch.Tensor, *_):
        return _norm_backward(ctx, saved, dxhat), *[None] * 5


def normalize_whole(
    ctx, x: torch.Tensor, estimate_key: str, recipe_key: str, mode: str, split: SplitSequences
) -> tuple:
    """The results of a forward that gathers shards x before the norm, of which h alone is differentiable."""
    whole = gather_tokens(x, split.group, split.processes).view(-1, x.shape[-1])
    recipe = from_key(recipe_key)
    xhat, rho = recipe.ops.normalize(whole, from_key(estimate_key), recipe, mode)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*(t for t in (whole, rho, *xhat) if t is not None))
    return without_data(whole, whole.shape), whole, rho, *xhat


@untraced
class NormThenGather(torch.autograd.Function):
    """Like ``GatherThenNorm``, but gathers codes after the norm. Without X; rho is of the shard's tokens only."""

    @staticmethod
    def forward(ctx, x, estimate_key: str, recipe_key: str, mode: str, split_key: str, is_compiled: bool, columns):
        recipe, split = from_key(recipe_key), from_key(split_key)
        rows = x.reshape(-1, x.shape[-1])
        codes, rho = recipe.ops.normalize(rows, from_key(estimate_key), recipe, mode, split.group, as_codes=True)
        codes = gather_codes(codes, 0, x.shape[0], split.group, split.processes)
        xhat = recipe.ops.from_codes(codes, operand_mode(recipe, mode), 1)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, rho)
        ctx.mode, ctx.split, ctx.is_compiled, ctx.columns = mode, split, is_compiled, columns
        ctx.mark_non_differentiable(*(t for t in (rho, *xhat) if t is not None))
        return without_data(x, (split.processes * rows.shape[0], rows.shape[1])), rho, *xhat

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dxhat: torch.Tensor, *_):
        ctx.columns.release()
        return _norm_backward(ctx, saved, dxhat), *[None] * 6


@untraced
class GatherSequences(torch.autograd.Function):
    """A shard [B, S / P, D] of sequences -> the whole sequences [B, S, D], of which every linear returns its part.

    Or a shard [T / P, D] -> [T, D].
    """

    @staticmethod
    def forward(ctx, x: torch.Tensor, split_key: str):
        ctx.set_materialize_grads(False)
        ctx.split = split = from_key(split_key)
        return gather_tokens(as_sequences(x), split.group, split.processes).view(*x.shape[:-2], -1, x.shape[-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dx: torch.Tensor):
        own = sum_tokens(as_sequences(dx), ctx.split.group, ctx.split.processes)
        return own.view(*dx.shape[:-2], -1, dx.shape[-1]), None


@untraced
class SumGradient(torch.autograd.Function):
    """y -> y, the result of a linear that every process has whole, for layers of which every process has a part.

    The parts of the gradient are summed before the linear casts it. The first process gets the sum and the others
    zeros, so that the gradients that the linear returns are parts of a sum as well.
    """

    @staticmethod
    def forward(ctx, y: torch.Tensor, split_key: str):
        ctx.set_materialize_grads(False)
        ctx.split = from_key(split_key)
        return y.view_as(y)

    @staticmethod
    @once_differentiable
    def backward(ctx, _, dy: torch.Tensor):
        dy = sum_parts(dy, ctx.split.group)
        return dy if ctx.split.rank == 0 else torch.zeros_like(dy), None


def _norm_backward(ctx, saved, dxhat: torch.Tensor) -> torch.Tensor:
    """This process's part of dL/dxhat of whole sequences [T, D] -> dx of its shard."""
    x, rho = saved
    batch, length, features = x.shape
    dxhat = dxhat.view(batch, ctx.split.processes * length, features)
    dxhat = sum_tokens(dxhat, ctx.split.group, ctx.split.processes)
    dx = norm_backward(dxhat.view(-1, features), x.reshape(-1, features), rho, ctx.mode, ctx.is_compiled)
    return dx.view(x.shape)


@dataclass(frozen=True, eq=False)
class GatheredColumns:
    """Gives the linears of one norm their operand of wgrad [D, T] from codes that are cast and gathered only once.

    The linear whose backward comes first gathers. Linears with another recipe of wgrad need codes of their own. In
    a compiled graph every linear gathers, and the compiler keeps one of the equal calls.

    Attributes:
        split_key: the key of the SplitSequences.
        operands: the operands so far; None in a compiled graph.
    """

    split_key: str
    operands: dict[Recipe, Operand] | None

    def for_function(self) -> "GatheredColumns":
        """Return itself; in a compiled graph one without operands, because a graph takes no dict."""
        return GatheredColumns(self.split_key, None) if torch.compiler.is_compiling() else self

    def operand(self, x, rho, signs, estimate: RMSEstimate, recipe: LinearRecipe, mode: str) -> Operand:
        """The operand of whole sequences, from this process's shard x [B, S / P, D] and its rho [B S / P].

        ``signs`` and ``estimate`` are those of all linears with this recipe (``ThreeGEMMs.quantize_along_tokens``).
        """
        operands = {} if self.operands is None else self.operands
        if recipe.wgrad not in operands:
            operands[recipe.wgrad] = self._gather(x, rho, signs, estimate, recipe, mode)
        return operands[recipe.wgrad]

    def release(self) -> None:
        """Forget the operands. The norm's backward calls this, after those of all its linears."""
        if self.operands is not None:
            self.operands.clear()

    def _gather(self, x, rho, signs, estimate: RMSEstimate, recipe: LinearRecipe, mode: str) -> Operand:
        split, (recipe, dim) = from_key(self.split_key), recipe.input_of_wgrad
        rows = x.reshape(-1, x.shape[-1])
        tensor_scale = recipe.ops.static_scale(x.shape[-1], estimate, recipe) if dim else None
        group = None if dim and recipe.tensor_scale == "row" else split.group  # of other rows
        spec = CastSpec(row_factor=rho, signs=signs, tensor_scale=tensor_scale, group=group, as_codes=True)
        codes = recipe.ops.cast([rows], recipe, mode, (dim,), spec)[dim]
        codes = gather_codes(codes, 1 - dim, x.shape[0], split.group, split.processes)
        if dim == 0:
            return recipe.ops.from_codes(codes, operand_mode(recipe, mode), dim)
        return Operand(recipe.ops.dequantize(codes, values_dtype(mode)).t())
