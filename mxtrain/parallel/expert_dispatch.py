"""What expert parallelism sends: MXFP8 codes, where an MXNorm or a cast makes them.

An MXNorm that ``sends_codes`` hands rows of tokens to experts as ``RoutedRows``. TorchTitan sends and permutes their
bytes as it does with values; its padding, zero bytes, decodes to zeros. The experts decode. So an element takes
1 + 1 / 32 bytes on the way instead of 2, and every operand has the same bits. Gradients of these rows, and the experts'
results, travel in high precision. With ``returns_codes``, gradients of the results travel as codes.

In both functions, ``sent`` and ``received`` are numbers of rows, to and from each process of ``group``, on the way to
the experts.
"""

import torch
import torch.nn as nn

from mxtrain.custom_op import untraced
from mxtrain.errors import ConfigError
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.once_differentiable import once_differentiable, without_data
from mxtrain.nn.routed_rows import pack, unpack
from mxtrain.ops.collectives import exchange_rows
from mxtrain.ops.quantize import cast
from mxtrain.recipes.formats import MXFP8
from mxtrain.recipes.recipe import from_key


@untraced
class SentRows(torch.autograd.Function):
    """h [T, D] -> what stands for the rows of this process's experts [P, D], without data.

    Args:
        index: int64 [R]: the token of every row that is sent.
        permuted: int64 [P]: the place of every row among those that are received; -1 for padding.
    """

    @staticmethod
    def forward(ctx, h: torch.Tensor, index: torch.Tensor, permuted: torch.Tensor, sent, received, group: str):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index, permuted)
        ctx.tokens, ctx.sent, ctx.received, ctx.group = h.shape[0], sent, received, group
        return without_data(h, (permuted.shape[0], h.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dx: torch.Tensor):
        index, permuted = saved
        in_order = dx.new_empty(sum(ctx.received) + 1, dx.shape[1])  # the last row takes the padding
        in_order[permuted] = dx
        dx = exchange_rows(in_order[:-1], ctx.sent, ctx.received, ctx.group)
        dh = dx.new_zeros(ctx.tokens, dx.shape[1]).index_put_((index,), dx, accumulate=True)
        return dh, None, None, None, None, None


@untraced
class ReturnedRows(torch.autograd.Function):
    """Results of this process's experts, in the order received -> those of its tokens [R, D].

    The gradient travels as codes.
    """

    @staticmethod
    def forward(ctx, y: torch.Tensor, sent, received, group: str, recipe_key: str, mode: str):
        ctx.set_materialize_grads(False)
        ctx.sent, ctx.received, ctx.group, ctx.recipe_key, ctx.mode = sent, received, group, recipe_key, mode
        return exchange_rows(y, sent, received, group)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: torch.Tensor):
        codes = cast([dy], from_key(ctx.recipe_key), ctx.mode, (1,), as_codes=True)[1]
        dy = unpack(exchange_rows(pack(codes), ctx.received, ctx.sent, ctx.group), dy.dtype)
        return dy, None, None, None, None, None


def returned(y: torch.Tensor, sent, received, group: str, experts: QuantizedExperts) -> torch.Tensor:
    """``ReturnedRows`` with the format in which these experts cast the gradient."""
    return ReturnedRows.apply(y, sent, received, group, experts.recipe.dgrad.key, experts.gemms(y.device).mode)


def returns_codes(experts: nn.Module) -> bool:
    """Whether gradients of the results of these experts travel as codes."""
    return isinstance(experts, QuantizedExperts) and experts.returns_codes and experts.recipe.dgrad.format is MXFP8


def choose_exchange(model: nn.Module, dispatch: str, combine_backward: str) -> None:
    """Tell norms before experts, and experts, what they send ("mxnorm.dispatch", "mxnorm.combine_backward").

    Raises:
        ConfigError: codes are asked for, and quantized experts have none to send.
    """
    for experts in model.modules():
        if not isinstance(experts, QuantizedExperts):
            continue
        norm = experts.fed_by[0] if experts.fed_by else None
        if dispatch == "quantized" and (norm is None or norm.scores_first):
            why = "no MXNorm feeds" if norm is None else "rows are multiplied by their scores before"
            raise ConfigError(f"mxnorm.dispatch = 'quantized' needs codes, and {why} {experts.fqn}: allowed is 'auto'")
        for name, gemm, chosen in (
            ("dispatch", "fprop", dispatch),
            ("combine_backward", "dgrad", combine_backward),
        ):
            recipes = [getattr(recipe, gemm) for recipe in experts.recipes]
            if chosen == "quantized" and all(recipe.format is not MXFP8 for recipe in recipes):
                raise ConfigError(
                    f"mxnorm.{name} = 'quantized' needs MXFP8 in {gemm}, and {experts.fqn} has {recipes[0].name!r}: "
                    f"allowed is {'auto' if name == 'dispatch' else 'high_precision'!r}"
                )
        if norm is not None:
            norm.sends_codes = dispatch != "high_precision"
        experts.returns_codes = combine_backward == "quantized"
