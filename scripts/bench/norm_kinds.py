"""The kinds of norm that ``norm.py`` measures: mxtrain's kernels, the reference, and the peers.

"vectors" are the weight and, for LayerNorm, the bias. "numbers" are the values of each row that the forward keeps for
the backward: rstd for RMSNorm, mean and rstd for LayerNorm.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F

from mxtrain.norms import reference as row_norms

EPS = 1e-5


class Peer(NamedTuple):
    """A norm of another package. Both functions prepare a call, and return it as a function without arguments.

    Attributes:
        packages: modules that must be installed.
        forward: (x, *vectors) -> y.
        backward: (dy, x, numbers, *vectors) -> gradients of x and of the vectors; None if there is none.
    """

    packages: tuple[str, ...]
    forward: Callable
    backward: Callable | None


class Kind(NamedTuple):
    """A kind of norm.

    Attributes:
        title: PyTorch's name of the function, for the names of peers.
        vectors: names of its vectors.
        centered: whether it subtracts the mean of the row.
        function: (x, *vectors) -> y, PyTorch's function.
        reference: (x, *vectors) -> y and numbers, in the dtype of x or fp32.
        reference_backward: (dy, x, *numbers, weight) -> gradients of x and of the vectors.
        kernel: (x, *vectors) -> y, mxtrain's.
        backward_kernel: (dy, x, *numbers, weight) -> gradients, mxtrain's.
        formula: whether the compiled reference backward is a separate peer. It is not for LayerNorm, where Inductor
            makes the same formula of F.layer_norm's backward.
        eager_backward: (dy, x, *vectors), PyTorch's own kernels.
        peers: kernels of other packages by their name in a table.
    """

    title: str
    vectors: tuple[str, ...]
    centered: bool
    function: Callable
    reference: Callable
    reference_backward: Callable
    kernel: Callable
    backward_kernel: Callable
    formula: bool
    eager_backward: Callable
    peers: dict[str, Peer]


# RMSNorm


def f_rms_norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(x, x.shape[-1:], weight, EPS)


def rms_norm_kernel(x, weight):
    from mxtrain.norms.kernels import row_norm

    return row_norm(x, weight, None, EPS, None, False)[0]


def rms_norm_reference(x, weight):
    y, _, rstd, _ = row_norms.row_norm(x, weight, None, EPS, None, False)
    return y, rstd


def rms_norm_backward_reference(dy, x, rstd, weight):
    return row_norms.row_norm_backward(dy, x, None, rstd, weight, None, weight.dtype)[:2]


def rms_norm_backward_kernel(dy, x, rstd, weight):
    from mxtrain.norms.kernels import row_norm_backward

    return row_norm_backward(dy, x, None, rstd, weight, None, weight.dtype)[:2]


def eager_rms_norm_backward(dy, x, weight):
    _, rstd = torch.ops.aten._fused_rms_norm(x, x.shape[-1:], weight, EPS)
    return lambda: torch.ops.aten._fused_rms_norm_backward(dy, x, x.shape[-1:], rstd, weight, [True, True])


def liger_rms_norm(x, weight):
    from liger_kernel.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, weight, EPS, 0.0, "llama", False)[0]


def liger_rms_norm_backward(dy, x, numbers, weight):
    from liger_kernel.ops.rms_norm import rms_norm_backward, rms_norm_forward

    _, _, rstd, block_size, warps, casting = rms_norm_forward(x, weight, EPS, 0.0, "llama", False)
    return lambda: rms_norm_backward(dy, x, weight, rstd, 0.0, casting, block_size, warps, False, False)[:2]


def quack_rms_norm(x, weight):
    from quack.rmsnorm import rmsnorm_fwd

    return lambda: rmsnorm_fwd(x, weight, eps=EPS, store_rstd=True)[0]


def quack_rms_norm_backward(dy, x, numbers, weight):
    from quack.rmsnorm import rmsnorm_bwd

    return lambda: rmsnorm_bwd(x, weight, dy, *numbers)[:2]


_LLAMA = 0  # Liger rounds x * rstd to the dtype of x before the weight


def cutedsl_rms_norm(x, weight):
    from liger_kernel.ops.backends._cutedsl.rms_norm import _rms_norm_cutedsl_forward

    return lambda: _rms_norm_cutedsl_forward(x, weight, EPS, 0.0, _LLAMA)[0]


def cutedsl_rms_norm_backward(dy, x, numbers, weight):
    from liger_kernel.ops.backends._cutedsl.rms_norm import _rms_norm_cutedsl_backward

    def run():
        dx, dweight = _rms_norm_cutedsl_backward(dy, x, weight, *numbers, False, _LLAMA)
        return dx, dweight.to(weight.dtype)

    return run


def cudnn_rms_norm(x, weight):
    import cudnn.ops.norm.rmsnorm  # noqa: F401 - registers the ops

    args = x[..., None, None], weight[None, :, None, None], EPS
    return lambda: torch.ops.cudnn.rmsnorm(*args)[0].view_as(x)


def cudnn_rms_norm_backward(dy, x, numbers, weight):
    import cudnn.ops.norm.rmsnorm  # noqa: F401 - registers the ops

    args = dy[..., None, None], x[..., None, None], weight[None, :, None, None], numbers[0].view(-1, 1, 1, 1)

    def run():
        dx, dweight, _ = torch.ops.cudnn.rmsnorm_bwd(*args)
        return dx.view_as(x), dweight.view_as(weight)

    return run


RMS = Kind(
    title="F.rms_norm",
    vectors=("weight",),
    centered=False,
    function=f_rms_norm,
    reference=rms_norm_reference,
    reference_backward=rms_norm_backward_reference,
    kernel=rms_norm_kernel,
    backward_kernel=rms_norm_backward_kernel,
    formula=True,
    eager_backward=eager_rms_norm_backward,
    peers={
        "Liger": Peer(("liger_kernel",), liger_rms_norm, liger_rms_norm_backward),
        "Liger CuTeDSL": Peer(("liger_kernel", "cutlass"), cutedsl_rms_norm, cutedsl_rms_norm_backward),
        "Quack": Peer(("quack",), quack_rms_norm, quack_rms_norm_backward),
        "cuDNN": Peer(("cudnn",), cudnn_rms_norm, cudnn_rms_norm_backward),
    },
)


# LayerNorm


def f_layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(x, x.shape[-1:], weight, bias, EPS)


def layer_norm_kernel(x, weight, bias):
    from mxtrain.norms.kernels import row_norm

    return row_norm(x, weight, bias, EPS, None, True)[0]


def layer_norm_backward_reference(dy, x, mean, rstd, weight):
    return row_norms.row_norm_backward(dy, x, mean, rstd, weight, None, weight.dtype, weight.dtype)


def layer_norm_backward_kernel(dy, x, mean, rstd, weight):
    from mxtrain.norms.kernels import row_norm_backward

    return row_norm_backward(dy, x, mean, rstd, weight, None, weight.dtype, weight.dtype)


def eager_layer_norm_backward(dy, x, weight, bias):
    shape = x.shape[-1:]
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, shape, weight, bias, EPS)
    wanted = [True, True, True]
    return lambda: torch.ops.aten.native_layer_norm_backward(dy, x, shape, mean, rstd, weight, bias, wanted)


def liger_layer_norm(x, weight, bias):
    from liger_kernel.ops.layer_norm import layer_norm_forward

    return lambda: layer_norm_forward(x, weight, bias, EPS)[0]


def liger_layer_norm_backward(dy, x, numbers, weight, bias):
    from liger_kernel.ops.layer_norm import layer_norm_backward, layer_norm_forward

    _, _, mean, rstd, *_ = layer_norm_forward(x, weight, bias, EPS)
    return lambda: layer_norm_backward(dy, x, weight, bias, mean, rstd)[:3]


def quack_layer_norm(x, weight, bias):
    from quack.rmsnorm import layernorm_fwd

    weight, bias = weight.float(), bias.float()  # it takes no others
    return lambda: layernorm_fwd(x, weight, bias, EPS, True, True)[0]


LAYER = Kind(
    title="F.layer_norm",
    vectors=("weight", "bias"),
    centered=True,
    function=f_layer_norm,
    reference=lambda x, weight, bias: row_norms.row_norm(x, weight, bias, EPS, None, True)[:3],
    reference_backward=layer_norm_backward_reference,
    kernel=layer_norm_kernel,
    backward_kernel=layer_norm_backward_kernel,
    formula=False,
    eager_backward=eager_layer_norm_backward,
    peers={
        "Liger": Peer(("liger_kernel",), liger_layer_norm, liger_layer_norm_backward),
        "Quack": Peer(("quack",), quack_layer_norm, None),
    },
)

KINDS = {"rms": RMS, "layer": LAYER}
