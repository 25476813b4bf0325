"""A pass that moves the rounding of a gradient to bf16 into the cast that follows it, in formats that have such casts.

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

from mxtrain.compile.nodes import CONVERT, VIEWS, as_matrix, describe_call
from mxtrain.formats.format import FORMATS


def fuse_rounding(graph: Graph) -> None:
    """Let casts read fp32 gradients instead of their bf16 copies."""
    targets = [fmt.ops.fusions.cast for fmt in FORMATS.values() if fmt.ops.fusions]
    for cast in [node for target in targets for node in graph.find_nodes(op="call_function", target=target)]:
        parts, axis, row_factor, column_factor, order, _, *others = cast.args
        source = _before_rounding(parts[0], cast) if len(parts) == 1 else None
        if source is None:
            continue
        with graph.inserting_before(cast):
            matrix = as_matrix(graph, source)
            settings = (axis, row_factor, column_factor, order, True, *others)
            new = graph.call_function(cast.target, ([matrix], *settings))
        describe_call(new, cast, cast.meta["val"])
        cast.replace_all_uses_with(new)
        graph.erase_node(cast)
    graph.eliminate_dead_code()


def _before_rounding(matrix: Node, cast: Node) -> Node | None:
    """Return ``matrix`` in fp32, if that is in memory and nothing but ``cast`` reads it rounded."""
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
