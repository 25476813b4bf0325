"""What expert parallelism sends: codes, where an MXNorm makes them.

An MXNorm that ``sends_codes`` hands rows of tokens to experts as ``RoutedRows``. TorchTitan sends and permutes their
bytes as it does with values; its padding, zero bytes, decodes to zeros. The experts decode. So an element of
MXFP8 takes 1 + 1 / 32 bytes on the way instead of 2, and every operand has the same bits. Gradients of these rows, and
the experts' results and their gradients, travel in high precision.
"""

import torch
import torch.nn as nn

from mxtrain.errors import ConfigError
from mxtrain.formats.collectives import exchange_rows
from mxtrain.formats.recipe import FORMATS
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.three_gemms import without_data


@untraced
class SentRows(torch.autograd.Function):
    """h [T, D] -> what stands for the rows of this process's experts [P, D], without data.

    Args:
        index: int64 [R]: the token of every row that is sent.
        permuted: int64 [P]: the place of every row among those that are received; -1 for padding.
        sent, received: numbers of rows, to and from each process of ``group``.
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


def choose_exchange(model: nn.Module, dispatch: str) -> None:
    """Tell norms before experts what they send ("mxnorm.dispatch")."""
    for experts in model.modules():
        if not isinstance(experts, QuantizedExperts):
            continue
        norm = experts.fed_by[0] if experts.fed_by else None
        if dispatch == "quantized" and (norm is None or norm.scores_first):
            why = "no MXNorm feeds" if norm is None else "rows are multiplied by their scores before"
            raise ConfigError(f"mxnorm.dispatch = 'quantized' needs codes, and {why} {experts.fqn}; set it to 'auto'")
        recipes = [recipe.fprop for recipe in experts.recipes]
        if dispatch == "quantized" and not any(recipe.sends_rows for recipe in recipes):
            formats = " or ".join(str(f) for f in FORMATS.values() if not (f.has_tensor_scale or f.gradients_of))
            raise ConfigError(
                f"mxnorm.dispatch = 'quantized' needs {formats} in fprop, and {experts.fqn} has {recipes[0].name!r}; "
                "set it to 'auto'"
            )
        if norm is not None:
            norm.sends_codes = dispatch != "high_precision"
