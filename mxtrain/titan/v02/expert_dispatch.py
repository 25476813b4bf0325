"""Expert parallelism that sends MXFP8 codes.

An MXNorm that ``sends_codes`` hands rows of tokens to experts as ``RoutedRows``. TorchTitan's ``ExpertParallel`` sends
and permutes their bytes as it does with values; its padding, zero bytes, decodes to zeros. The experts decode. So an
element takes 1 + 1 / 32 bytes on the way instead of 2, and every operand has the same bits. Gradients of these rows,
and the experts' results, travel in high precision. With ``returns_codes``, gradients of the results travel as codes.
"""

import torch
import torch.nn as nn
from torchtitan.distributed.expert_parallel import ExpertParallel
from torchtitan.models.moe.utils import _unpermute

from mxtrain.errors import ConfigError
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.nn.once_differentiable import once_differentiable, without_data
from mxtrain.nn.routed_rows import RoutedRows, pack, unpack
from mxtrain.ops.collectives import exchange_rows
from mxtrain.ops.quantize import cast
from mxtrain.recipes.formats import MXFP8
from mxtrain.recipes.recipe import Recipe


class _Dispatch(torch.autograd.Function):
    """h [T, D] -> what stands for the rows of this process's experts [P, D], without data."""

    @staticmethod
    def forward(ctx, h: torch.Tensor, index: torch.Tensor, permuted: torch.Tensor, shape, back: tuple):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(index, permuted)
        ctx.tokens, ctx.shape, ctx.back = len(h), shape, back
        return without_data(h, (len(permuted), h.shape[1]))

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dx: torch.Tensor):
        index, permuted = saved
        dx = exchange_rows(_unpermute(dx, ctx.shape, permuted), *ctx.back)
        dh = dx.new_zeros(ctx.tokens, dx.shape[1]).index_put_((index,), dx, accumulate=True)
        return dh, None, None, None, None


class _Combine(torch.autograd.Function):
    """The results of this process's experts -> those of its tokens [R, D], whose gradient travels as codes."""

    @staticmethod
    def forward(ctx, y: torch.Tensor, back: tuple, recipe: Recipe, mode: str):
        ctx.set_materialize_grads(False)
        received, sent, group = back
        ctx.there, ctx.recipe, ctx.mode = (sent, received, group), recipe, mode
        return exchange_rows(y, *back)

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: torch.Tensor):
        codes = cast([dy], ctx.recipe, ctx.mode, (1,), as_codes=True)[1]
        return unpack(exchange_rows(pack(codes), *ctx.there), dy.dtype), None, None, None


class CodesExpertParallel(ExpertParallel):
    """``ExpertParallel`` that also takes ``RoutedRows``. For tensors it does the same."""

    def _token_dispatch(self, mod, inputs, device_mesh):
        rows, counts = inputs
        if not isinstance(rows, RoutedRows):
            return super()._token_dispatch(mod, inputs, device_mesh)
        packed, counts = super()._token_dispatch(mod, (rows.packed[rows.index], counts), device_mesh)
        self.input_shape = (self.input_shape[0], rows.h.shape[1])  # of the results, not of the bytes
        h = _Dispatch.apply(rows.h, rows.index, self.permuted_indices, self.input_shape, self._back(device_mesh))
        return RoutedRows(h, packed), counts

    def _token_combine(self, mod, routed_output, device_mesh):
        if not (isinstance(mod, QuantizedExperts) and mod.returns_codes and mod.recipe.dgrad.format is MXFP8):
            return super()._token_combine(mod, routed_output, device_mesh)
        y = _unpermute(routed_output, self.input_shape, self.permuted_indices)
        return _Combine.apply(y, self._back(device_mesh), mod.recipe.dgrad, mod.gemms(y.device).mode)

    def _back(self, device_mesh) -> tuple[list[int], list[int], str]:
        """What ``exchange_rows`` takes beside rows that return to the processes of their tokens."""
        return self.input_splits, self.output_splits, device_mesh.get_group().group_name


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
