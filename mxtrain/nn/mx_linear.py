"""A linear layer whose three GEMMs are quantized, for inputs that no MXNorm has prepared."""

import torch

from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.three_gemms import QuantizedLinear, ReadyOperands, ThreeGEMMs, check_dtype, check_input, compute_dtype


@untraced
class _MXLinearFunction(torch.autograd.Function):
    """X [T, D], W [N, D] -> Y [T, N] in the dtype of X; the casts pass gradients straight through."""

    @staticmethod
    def forward(
        ctx, x: torch.Tensor, weight: torch.Tensor, signs, draws, gemms: ThreeGEMMs, ready: ReadyOperands | None
    ):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, signs)
        ctx.gemms, ctx.draws, ctx.ready = gemms, draws, ready
        return gemms.fprop(gemms.quantize_activation(x), [weight], x.dtype, ready=ready)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dy: torch.Tensor):
        x, weight, signs = saved
        gemms, (needs_x, needs_weight, *_) = ctx.gemms, ctx.needs_input_grad
        for_dx, for_dw = gemms.quantize_gradients([dy], needs_x, needs_weight and gemms.runs_wgrad, signs, [ctx.draws])
        dx = None if for_dx is None else gemms.dgrad(for_dx, [weight], x.dtype, ready=ctx.ready)
        dw = None
        if for_dw is not None:
            dw = gemms.wgrad(for_dw, gemms.quantize_along_tokens(x, signs=signs), x.dtype).to(weight.dtype)
        return dx, dw, None, None, None, None


class MXLinear(QuantizedLinear):
    """``torch.nn.Linear`` whose operands are cast as the recipe says. Parameters, FQNs and shapes stay the same.

    The weight is cast from its own dtype, so fp32 master weights are not rounded to bf16 first. Under autocast, input
    and result have autocast's dtype, as in ``torch.nn.Linear``.

    Args:
        in_features, out_features: multiples of the recipe's block sizes.
        bias: whether to add a bias, in high precision.
        recipe: a name, a spec with a name for each GEMM (see ``mxtrain.formats.parse.get_recipe``), or a Recipe.
        mode: "native", "emulated", "reference", or "auto": the best of them on the input's device. Or "fp8_merged"
            (``mxtrain.formats.mx.merged``), for which 128 divides both numbers of features.

    Raises:
        ConfigError: for an unknown recipe or mode, a mode that no device of this machine runs, or features that are
            not whole blocks. In a forward: for a mode that the device of the input lacks.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., in_features], bf16 or fp32 -> [..., out_features]; this process's part of a split layer.

        Raises:
            ValueError: for another dtype, shape or device.
        """
        gemms, (weight, bias) = self.gemms(x.device), self.parts()
        check_input(x, weight.shape[1], weight, self.recipe, gemms.mode)
        x = x.to(compute_dtype(x))
        check_dtype("x under autocast", x.dtype, self.recipe, gemms.mode)
        rows = x.reshape(-1, x.shape[-1])
        signs, draws = self.signs(x.device), self.draws(x.device)
        y = _MXLinearFunction.apply(rows, weight, signs, draws, gemms, self.ready_with(None))
        y = y.view(*x.shape[:-1], weight.shape[0])
        return y if bias is None else y + bias.to(y.dtype)
