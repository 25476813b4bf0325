"""Nodes of a graph, and views that only regroup rows.

The result of a node, a fake tensor with shape, dtype and strides, is in ``node.meta["val"]``.
"""

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
_VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default)


def without_views(node: Node) -> Node:
    """Return the node whose rows ``node`` is, before any view that only regroups rows."""
    while _regroups_rows(node):
        node = node.args[0]
    return node


def final_users(node: Node) -> set[Node]:
    """Return what uses ``node`` or a view that only regroups its rows, without those views."""
    found = set()
    for user in node.users:
        found |= final_users(user) if _regroups_rows(user) else {user}
    return found


def as_matrix(graph: Graph, node: Node) -> Node:
    """Return the rows of ``node`` as a matrix; a new view unless it is one."""
    value = node.meta["val"]
    if value.ndim == 2:
        return node
    matrix = graph.call_function(aten.view.default, (node, [-1, value.shape[-1]]))
    matrix.meta = {**node.meta, "val": value.view(-1, value.shape[-1])}
    return matrix


def describe_call(node: Node, like: Node, results: list[torch.Tensor]) -> None:
    """Give a new call of an operation its ``results``, and what PyTorch knows of the call ``like`` for all else."""
    node.meta = {
        **like.meta,
        "val": results,
        # Inductor keeps to the strides of these.
        "eager_input_vals": torch.fx.map_arg((node.args, {}), lambda argument: argument.meta["val"]),
    }


def _regroups_rows(node: Node) -> bool:
    if node.op != "call_function" or node.target not in _VIEWS:
        return False
    mine, others = _row_length(node), _row_length(node.args[0])
    return mine is not None and others is not None and statically_known_true(mine == others)


def _row_length(node: Node):
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.ndim else None
