"""A pass that moves the rounding of a gradient to bf16 into the MXFP8 cast that follows it.

    before    one kernel reads g in fp32 and writes it in bf16; the cast reads that
    after     the cast reads g in fp32, and rounds it to bf16 first

The casts have the same bits. Bytes per element, with both bf16 images of a gradient: 4 + 2 and 2 + 4, together 12;
after 4 + 4, which is 8.

In a Llama block such a gradient is the one of w2's output, where the residual stream is fp32 (fp32 weights under
autocast).

Only the inputs of a graph are known to be in memory in fp32. Other gradients Inductor computes inside the kernel that
rounds them, so nothing would be saved. The same holds where something else reads the rounded gradient.
"""

import torch
from torch.fx import Graph, Node

from mxtrain.inductor.nodes import CONVERT, VIEWS, describe_call
from mxtrain.ops.hardware import HAS_TRITON

if HAS_TRITON:
    # These modules register the operations.
    import mxtrain.kernels.mxfp8.cast
    import mxtrain.kernels.mxfp8.joined_cast  # noqa: F401

aten, ours = torch.ops.aten, torch.ops.mxtrain


def fuse_rounding(graph: Graph) -> None:
    """Let MXFP8 casts read fp32 gradients instead of their bf16 copies."""
    if not HAS_TRITON:
        return
    # Number of arguments that hold matrices, and index of "to_bf16".
    for op, matrices, to_bf16 in ((ours.cast.default, 1, 3), (ours.joined_cast.default, 2, 4)):
        for cast in list(graph.find_nodes(op="call_function", target=op)):
            # Matrices that are cast together have the same dtype: no other one can be in fp32.
            args = torch.fx.map_arg(cast.args[:matrices], lambda matrix: _wide(matrix, cast))  # noqa: B023
            if args == cast.args[:matrices]:
                continue
            with graph.inserting_before(cast):
                new = graph.call_function(op, (*args, *cast.args[matrices:to_bf16], True, *cast.args[to_bf16 + 1 :]))
            describe_call(new, cast, cast.meta["val"])
            cast.replace_all_uses_with(new)
            graph.erase_node(cast)
    graph.eliminate_dead_code()


def _wide(matrix: Node, cast: Node) -> Node:
    """Return ``matrix`` before it was rounded, if that is in memory and nothing but ``cast`` reads it rounded."""
    source = _before_rounding(matrix, cast)
    if source is None:
        return matrix
    shape = matrix.meta["val"].shape
    with cast.graph.inserting_before(cast):
        view = cast.graph.call_function(aten.view.default, (source, [-1, shape[-1]]))
    view.meta = {**source.meta, "val": source.meta["val"].view(shape)}
    return view


def _before_rounding(matrix: Node, cast: Node) -> Node | None:
    node, user = matrix, cast
    while node.target in VIEWS and {*node.users} == {user}:
        node, user = node.args[0], node
    if node.target is not CONVERT or {*node.users} != {user}:
        return None
    source = node.args[0]
    value = source.meta["val"]
    return source if value.dtype == torch.float32 and value.is_contiguous() and _is_input(source) else None


def _is_input(node: Node) -> bool:
    """Whether ``node`` is an input of the graph or a view of one."""
    while node.target in VIEWS:
        node = node.args[0]
    return node.op == "placeholder"
