"""Graphs of functions as Inductor's passes see them, and checks of what a pass made of them."""

from collections import Counter

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode


def draw(*shape, seed):
    drawn = torch.randn(shape, generator=torch.Generator("cpu").manual_seed(seed), device="cpu")
    return drawn.to(torch.get_default_device())


def graph_after(one_pass, function, *inputs, symbolic=False) -> torch.fx.GraphModule:
    """The graph of a function after a pass."""
    mode = "symbolic" if symbolic else "fake"
    module = make_fx(function, decomposition_table=select_decomp_table(), tracing_mode=mode)(*inputs)
    module.graph.eliminate_dead_code()  # as Inductor does before all passes
    one_pass(module.graph)
    module.graph.lint()
    module.recompile()
    return module


def operations(module) -> list[str]:
    """Names of all operations but views and selections of results, in order."""
    names = [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    return [name for name in names if not any(each in name for each in ("view", "getitem", "alias"))]


def assert_same(module, function, *inputs):
    """Check that the graph has the function's bits, and that its metadata has their shapes and dtypes."""
    want = function(*inputs)
    (output,) = module.graph.find_nodes(op="output")
    for one, other, node in zip(module(*inputs), want, output.args[0], strict=True):
        described = node.meta["val"]
        assert torch.equal(one, other) and one.dtype == other.dtype == described.dtype
        assert not isinstance(described.shape[0], int) or one.shape == described.shape


def graphs_after_all_passes():
    """A backend for ``torch.compile`` that runs the graphs that Inductor would generate code for."""
    from mxtrain.compile import passes

    def after(some_passes, module):
        for one in some_passes:
            one(module.graph)
        module.recompile()
        return module

    def partition(joint, inputs, **kwargs):
        return min_cut_rematerialization_partition(after(passes.JOINT, joint), inputs, compiler="inductor", **kwargs)

    def run(module, inputs):
        return make_boxed_func(after(passes.POST_GRAD, module).forward)

    return aot_autograd(fw_compiler=run, bw_compiler=run, partition_fn=partition, decompositions=select_decomp_table)


class Calls(TorchDispatchMode):
    """Counts the operations that run."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func] += 1
        return func(*args, **(kwargs or {}))
