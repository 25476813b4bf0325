"""A small gated feed-forward, and the graphs of its forward and backward after a pass."""

from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from mxtrain import MXLinear

T, D, H = 34, 32, 64


def swiglu(gate, up):
    return F.silu(gate) * up


class FeedForward(nn.Module):
    """w2(product(w1(x), w3(x))); with ``joined``, w1 and w3 are one layer. ``times`` as wide as D and H say."""

    def __init__(self, product=swiglu, recipe="mxfp8", down=None, joined=False, also_h=False, mode="emulated", times=1):
        super().__init__()
        self.product, self.joined, self.also_h = product, joined, also_h
        linear = partial(MXLinear, bias=False, mode=mode)
        self.columns, wide = D * times, H * times
        self.w13 = nn.ModuleList(
            linear(self.columns, h, recipe=recipe) for h in ([2 * wide] if joined else [wide, wide])
        )
        self.w2 = linear(wide, self.columns, recipe=down or recipe)
        generator = torch.Generator("cpu").manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, device="cpu") / 4)

    def forward(self, x):
        gate, up = self.w13[0](x).chunk(2, -1) if self.joined else (w(x) for w in self.w13)
        h = self.product(gate, up)
        y = self.w2(h)
        return y + h.mean() if self.also_h else y


def graphs_of(module, rewrite, autocast=True, execute=False):
    """Compile forward and backward; return their graphs, and the output with all gradients, which hold zeros unless
    the graphs are executed."""
    graphs = []

    def compiled(graph, _):
        graphs.append(graph.graph)
        return make_boxed_func(graph if execute else partial(zeros, graph.graph))

    def partition(graph, *args, **kwargs):
        rewrite(graph.graph)
        graph.graph.lint()
        graph.recompile()
        return min_cut_rematerialization_partition(graph, *args, **kwargs)

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=compiled, partition_fn=partition, decompositions=select_decomp_table())
    x = torch.randn(
        2, T // 2, getattr(module, "columns", D), generator=torch.Generator("cpu").manual_seed(1), device="cpu"
    )
    x = x.to(torch.get_default_device()).requires_grad_()
    module.zero_grad()
    with torch.autocast(x.device.type, dtype=torch.bfloat16, enabled=autocast):
        y = torch.compile(module, backend=backend, fullgraph=True)(x)
    y.float().square().sum().backward()
    return graphs, [y, x.grad, *(p.grad for p in module.parameters())]


def zeros(graph, *_):
    """What the graph returns, with zeros for results."""
    (output,) = graph.find_nodes(op="output")
    values = [None if node is None else node.meta["val"] for node in output.args[0]]
    return [None if v is None else torch.zeros(v.shape, dtype=v.dtype, device=v.device) for v in values]


def kept_for_backward(graph, times=1) -> int:
    """Tensors with the size of h that the forward's graph returns; ``times`` as for the module."""
    (output,) = graph.find_nodes(op="output")
    return sum(node.meta["val"].numel() == T * H * times for node in output.args[0])
