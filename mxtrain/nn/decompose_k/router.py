"""The gate of a mixture-of-experts router: fp32 logits from low-precision operands, with gradients.

C = epilogue(A B + bias)        A [M, K] tokens, B [K, N] the transposed weight: M or N is small, K is long
dA = dC B^T                     reduces over the N experts: an ordinary product
dB = A^T dC                     reduces over the M tokens: again a small result and a long reduction
"""

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from mxtrain.errors import require_positive_integer
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.launch.functions import once_differentiable, untraced
from mxtrain.nn.decompose_k import op as ops
from mxtrain.nn.decompose_k.reference import Epilogue
from mxtrain.nn.split import own_part


@untraced
class _DecomposeKFunction(torch.autograd.Function):
    """(a [M, K], b [K, N], bias [N] or None) -> epilogue(a b + bias) [M, N]."""

    @staticmethod
    def forward(ctx, a, b, bias, epilogue: str | None, out_dtype: torch.dtype):
        c = ops.decompose_k_mm(a, b, bias, epilogue, out_dtype)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b, None if epilogue is None else c)
        ctx.epilogue, ctx.bias_dtype = epilogue, None if bias is None else bias.dtype
        return c

    @staticmethod
    @once_differentiable
    def backward(ctx, saved, dc: torch.Tensor):
        a, b, c = saved
        needs_a, needs_b, needs_bias, *_ = ctx.needs_input_grad
        da = db = dbias = None
        dc = _before_epilogue(dc, c, ctx.epilogue)
        if needs_bias:
            dbias = at_least_fp32(dc).sum(0).to(ctx.bias_dtype)
        # Tensor cores multiply operands of one dtype, so dC is rounded to theirs. A gate in that dtype rounds its
        # gradient as well, and sums over experts and tokens in fp32 as we do.
        dc = dc.to(a.dtype)
        if needs_a:
            # Inductor can fuse torch.mm with the sum over all uses of a. In fp32, torch.mm may use TF32: use our op.
            wide = a.dtype == torch.float32
            da = ops.decompose_k_mm(dc, b.t(), None, None, a.dtype) if wide else torch.mm(dc, b.t())
        if needs_b:
            # Lay db out like b, usually a transposed weight: autograd then copies no gradient.
            if b.is_contiguous():
                db = ops.decompose_k_mm(a.t(), dc, None, None, b.dtype)
            else:
                db = ops.decompose_k_mm(dc.t(), a, None, None, b.dtype).t()
        return da, db, dbias, None, None


def _before_epilogue(dc: torch.Tensor, c: torch.Tensor | None, epilogue: str | None) -> torch.Tensor:
    """Return the gradient of a b + bias from the gradient and result c of its epilogue; fp32 if there is one."""
    if epilogue is None:
        return dc
    dc, c = at_least_fp32(dc), at_least_fp32(c)
    if epilogue == "relu":
        return torch.ops.aten.threshold_backward(dc, c, 0)  # a product with 0 would turn infinite gradients into NaN
    if epilogue == "sigmoid":
        return dc * c * (1 - c)
    return c * (dc - (dc * c).sum(1, keepdim=True))


def decompose_k_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None = None,
    epilogue: Epilogue | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Compute epilogue(a b + bias) for small results and long reductions: programs share K, then sum their parts.

    The arithmetic is fp32, never TF32, and the result is rounded once. Every call chooses its route by shape: split
    products by Triton or by ``torch.bmm``, or plain ``torch.mm`` where splitting gains nothing. Gradients have the
    dtypes of their tensors and are summed in fp32; dC is rounded to the dtype of ``a`` before it is multiplied.
    Results and gradients are deterministic; second derivatives and forward-mode derivatives are not supported. Autocast
    casts a and b as for ``torch.mm``.

    Source: Decompose-K, PyTorch Conference 2025.

    Args:
        a: bf16, fp16, fp32 or fp64 [M, K], any strides. fp64 runs in plain PyTorch.
        b: [K, N] in the dtype of a, any strides.
        bias: [N] in the dtype of a or fp32.
        epilogue: None, "relu", "sigmoid" or "softmax" (over N).
        out_dtype: float32, or None for the dtype of a.

    Returns:
        [M, N] of ``out_dtype``.

    Raises:
        ValueError: for mismatched shapes, dtypes or devices, or an unknown epilogue.
    """
    # Autocast leaves fp64 alone and does not exist for meta tensors.
    if a.dtype != torch.float64 and not a.is_meta and torch.is_autocast_enabled(a.device.type):
        dtype = torch.get_autocast_dtype(a.device.type)
        a, b = a.to(dtype), b.to(dtype)
    ops.check_operands(a, b, bias, epilogue, out_dtype)
    out_dtype = out_dtype or a.dtype
    needs_gradients = any(tensor is not None and tensor.requires_grad for tensor in (a, b, bias))
    if torch.is_grad_enabled() and needs_gradients:
        return _DecomposeKFunction.apply(a, b, bias, epilogue, out_dtype)
    return ops.decompose_k_mm(a, b, bias, epilogue, out_dtype)


class DecomposeKRouter(nn.Linear):
    """The gate of a router: an ``nn.Linear`` to few experts whose logits are always fp32.

    The parameters are those of ``nn.Linear``, so checkpoints load either way. Autocast casts the operands, not the
    logits. A DTensor weight must be replicated, as in TorchTitan's tensor parallelism. With a DTensor x, every
    process has the whole gradient of the logits. With a plain x, every process has a part of this gradient, and returns
    parts of all other gradients.

    Args:
        in_features: width K of a token.
        out_features: number N of experts.
        bias: whether to add a bias.

    Raises:
        ConfigError: for numbers of features that are no positive integers.
    """

    def __init__(self, in_features: int, out_features: int, bias: bool = True, **factory_kwargs):
        require_positive_integer("in_features", in_features)
        require_positive_integer("out_features", out_features)
        super().__init__(in_features, out_features, bias, **factory_kwargs)

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> "DecomposeKRouter":
        """Return the DecomposeKRouter that replaces ``linear`` and shares its parameters."""
        new = cls(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        new.weight, new.bias = linear.weight, linear.bias
        return new.train(linear.training)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., K] -> fp32 logits [..., N].

        Raises:
            ValueError: for mismatched dtypes of x and weight, or DTensors that are not replicated.
        """
        parameters = [parameter for parameter in (self.weight, self.bias) if parameter is not None]
        if any(isinstance(tensor, DTensor) for tensor in (x, *parameters)):
            _check_replicated(x, parameters)
        if isinstance(x, DTensor):
            logits = _logits(x.to_local(), *(parameter.to_local() for parameter in parameters))
            return DTensor.from_local(logits, x.device_mesh, x.placements, run_check=False)
        return _logits(x, *(own_part(parameter) for parameter in parameters))


def _check_replicated(x: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    given = parameters if not isinstance(x, DTensor) else [x, *parameters]
    if not all(isinstance(t, DTensor) and all(p.is_replicate() for p in t.placements) for t in given):
        placements = ", ".join(str(getattr(tensor, "placements", "a plain tensor")) for tensor in (x, *parameters))
        raise ValueError(
            f"x and parameters of a DecomposeKRouter are {placements}; all must be plain, or the parameters "
            "replicated and x plain or replicated"
        )


def _logits(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    logits = decompose_k_mm(x.reshape(-1, x.shape[-1]), weight.t(), bias, out_dtype=torch.float32)
    return logits.view(*x.shape[:-1], weight.shape[0])
