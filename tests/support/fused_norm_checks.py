"""What tests of FusedRMSNorm and FusedLayerNorm share: gradients against fp64, and the operations of a graph."""

import torch
from functorch.compile import make_boxed_func
from torch._dynamo.backends.common import aot_autograd


def doubles(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def gradients(function, tensors, dys):
    """Outputs of ``function``, and gradients of those tensors that are not None."""
    outputs = function(*tensors)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    wanted = [tensor for tensor in tensors if tensor is not None]
    return [*outputs, *torch.autograd.grad(outputs, wanted, dys[: len(outputs)])]


def assert_rounded_once(results, expected, dtype):
    """Allows one rounding to ``dtype``; an fp32 sum differs by more than its rounding where its terms cancel."""
    for got, want in zip(results, expected, strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got.double(), want, rtol=torch.finfo(dtype).eps, atol=2e-6 * want.abs().max().item())


def noting_backend(ops: list[str]):
    """A backend of ``torch.compile`` that adds the names of mxtrain's operations in its graphs to ``ops``."""

    def note(graph, _):
        ops.extend(str(node.target) for node in graph.graph.nodes if "mxtrain" in str(node.target))
        return make_boxed_func(graph.forward)

    return aot_autograd(fw_compiler=note)


def assert_contiguous_results(fused, plain, dim: int) -> None:
    """Require it for transposed rows, as a patch embedding gives them: models view the results.

    No kernel takes fp64.
    """
    for dtype in (torch.float32, torch.float64):
        x, residual = (torch.randn(2, dim, 6, dtype=dtype).transpose(1, 2) for _ in range(2))
        fused, plain = fused.to(dtype), plain.to(dtype)
        y, total = fused(x, residual)
        assert fused(x).stride() == plain(x).stride() == y.stride() == total.stride() == (6 * dim, dim, 1)
