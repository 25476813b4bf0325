"""Helpers for nodes of a graph, and for views that only regroup rows.

``node.meta["val"]`` holds the result of a node: a fake tensor with shape, dtype and strides.
"""

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

aten = torch.ops.aten
CONVERT = torch.ops.prims.convert_element_type.default
VIEWS = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.alias.default, aten.detach.default)


def without_views(node: Node) -> Node:
    """Return the node that computed the rows of ``node``, before all views that only regroup rows."""
    while _regroups_rows(node):
        node = node.args[0]
    return node


def final_users(node: Node) -> set[Node]:
    """Return the users of ``node`` and of its views that only regroup rows. The views themselves are left out."""
    found = set()
    for user in node.users:
        found |= final_users(user) if _regroups_rows(user) else {user}
    return found


def that_depend_on_tangents(graph: Graph) -> set[Node]:
    """Return the nodes that depend on the gradients of the graph's results."""
    found: set[Node] = set()
    for node in graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in node.target
        if is_tangent or not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return found


def as_matrix(graph: Graph, node: Node) -> Node:
    """Return ``node`` as a matrix [rows, last dimension]: the node itself, or a new view of it."""
    value = node.meta["val"]
    if value.ndim == 2:
        return node
    matrix = graph.call_function(aten.view.default, (node, [-1, value.shape[-1]]))
    matrix.meta = {**node.meta, "val": value.view(-1, value.shape[-1])}
    return matrix


def describe_call(node: Node, like: Node, results: list[torch.Tensor]) -> None:
    """Give a new call of an operation its ``results``, and all other metadata of the call ``like``."""
    node.meta = {
        **like.meta,
        "val": results,
        # Inductor passes arguments with the strides of these tensors.
        "eager_input_vals": torch.fx.map_arg((node.args, {}), lambda argument: argument.meta["val"]),
    }


def _regroups_rows(node: Node) -> bool:
    if node.op != "call_function" or node.target not in VIEWS:
        return False
    mine, others = _row_length(node), _row_length(node.args[0])
    return mine is not None and others is not None and statically_known_true(mine == others)


def _row_length(node: Node):
    value = node.meta.get("val")
    return value.shape[-1] if isinstance(value, torch.Tensor) and value.ndim else None
