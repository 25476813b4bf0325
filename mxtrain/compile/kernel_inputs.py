"""Passes that move an operation on a kernel's input into the kernel. All results keep their bits.

``fuse_residual_add`` moves the residual add before an MXNorm into the norm's kernel:

    before    h = x + residual; norm(h); other operations use h, too
    after     one kernel reads x and residual, and writes norm(h) and h

The kernel rounds h to its dtype and normalizes the rounded h. Bytes per element in the forward of a Llama block, whose
second norm has its residual add in the same graph. fp32: a residual stream of fp32 beside linears in bf16 (fp32 weights
under autocast). bf16: a stream of bf16 (FSDP's mixed precision). The norm writes bf16 images.

    stream   add: reads, writes   norm: reads, writes   sum   fused: reads, writes
    fp32     4 + 2, 4             4, 2                  16    4 + 2, 4 + 2   12
    bf16     2 + 2, 2             2, 2                  10    2 + 2, 2 + 2    8

The kernel reads both summands from memory. Without the fusion, Inductor computes a summand inside its own addition if
only pointwise operations produce and use the summand. Storing such a summand for the kernel costs at least as much as
the fusion saves, so these graphs stay unfused. In Llama both summands are in memory: x is the block's input, and
residual is a matrix product.

``fuse_rounding`` moves the rounding of a gradient to bf16 into the cast that follows it, in formats that have such
casts:

    before    one kernel reads g in fp32 and writes it in bf16; the cast reads that
    after     the cast reads g in fp32, and rounds it to bf16 first

Bytes per element, with both bf16 images of a gradient: 4 + 2 and 2 + 4, together 12; after 4 + 4, which is 8. In a
Llama block such a gradient is the one of w2's output, where the residual stream is fp32 (fp32 weights under autocast).
Only the inputs of a graph are known to be in memory in fp32. Other gradients Inductor computes inside the kernel that
rounds them, so nothing would be saved. The same holds where something else reads the rounded gradient.

The passes work on the graphs after PyTorch has split forward and backward, so a block that is computed again in the
backward is changed there, too.
"""

import operator

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mxtrain.compile.nodes import CONVERT, VIEWS, as_matrix, describe_call, final_users, without_views
from mxtrain.formats.recipe import FORMATS

aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float32)


def fuse_residual_add(graph: Graph) -> None:
    """Let the kernel of every MXNorm compute the sum that it normalizes, where the kernel can."""
    targets = {op for fmt in FORMATS.values() for op in fmt.ops.norms}
    for norm in [node for node in graph.nodes if node.target in targets]:
        total = without_views(norm.args[0])
        if norm.args[1] is None and (summands := _x_and_residual(total)):
            _fuse(graph, norm, *summands, total)
            graph.eliminate_dead_code()


def _x_and_residual(total: Node) -> tuple[Node, Node] | None:
    """Return the summands of ``total`` as (x, residual), or None if the kernel cannot add them.

    x has the dtype of ``total``, because the kernel rounds the sum to the dtype of x.
    """
    # ``_fuse`` makes a view with the sizes of ``total``, of which one may be symbolic.
    if total.target is not aten.add.Tensor or total.kwargs.get("alpha", 1) != 1 or _sizes(total).count(-1) > 1:
        return None
    if not all(isinstance(each, Node) and _has_shape_of(each, total) for each in total.args):
        return None
    one, other = map(_without_widening, total.args)
    if not all(map(_is_in_memory, (one, other))):
        return None
    for x, residual in ((one, other), (other, one)):
        if x.meta["val"].dtype == total.meta["val"].dtype:
            return x, residual
    return None


def _fuse(graph: Graph, norm: Node, x: Node, residual: Node, total: Node) -> None:
    """Put the fused norm in the place of the sum, before all users of the sum and of the norm."""
    rows, _, *numbers = norm.args
    with graph.inserting_before(total):
        matrices = (as_matrix(graph, x), as_matrix(graph, residual))
        fused = graph.call_function(norm.target, (*matrices, *numbers))
        describe_call(fused, norm, [*norm.meta["val"], rows.meta["val"]])
        stored = graph.call_function(operator.getitem, (fused, len(norm.meta["val"])))
        stored.meta = {**total.meta, "val": rows.meta["val"]}
        new_total = graph.call_function(aten.view.default, (stored, _sizes(total)))
        new_total.meta = total.meta
    total.replace_all_uses_with(new_total)
    norm.replace_all_uses_with(fused)


def _without_widening(node: Node) -> Node:
    """Return the node that computed the rows of ``node``, before conversions from bf16 to fp32.

    The kernel makes these exact conversions while it loads.
    """
    node = without_views(node)
    while node.target is CONVERT and (node.args[0].meta["val"].dtype, node.args[1]) == (torch.bfloat16, torch.float32):
        node = without_views(node.args[0])
    return node


def _is_in_memory(node: Node) -> bool:
    """Whether the kernel takes the result of ``node``, and Inductor stores it: it cannot compute it in every user."""
    value = node.meta["val"]
    if value.dtype not in _DTYPES or not value.is_contiguous():
        return False
    return not _is_fusible(node) or not all(map(_is_fusible, final_users(node)))


def _is_fusible(node: Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.pointwise in node.target.tags or node.target in (CONVERT, aten.clone.default)


def _has_shape_of(node: Node, other: Node) -> bool:
    mine, others = node.meta["val"].shape, other.meta["val"].shape
    return len(mine) == len(others) and all(statically_known_true(a == b) for a, b in zip(mine, others))


def _sizes(node: Node) -> list[int]:
    return [size if isinstance(size, int) else -1 for size in node.meta["val"].shape]


def fuse_rounding(graph: Graph) -> None:
    """Let casts read fp32 gradients instead of their bf16 copies."""
    targets = {fmt.ops.fusions.cast for fmt in FORMATS.values() if fmt.ops.fusions}
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
    source = stored = node.args[0]
    while stored.target in VIEWS:
        stored = stored.args[0]
    value, is_input = source.meta["val"], stored.op == "placeholder"
    return source if value.dtype == torch.float32 and value.is_contiguous() and is_input else None
