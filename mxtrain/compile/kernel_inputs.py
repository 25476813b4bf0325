"""A pass that moves the residual add before an MXNorm into the norm's kernel.

    before    h = x + residual; norm(h); other operations use h, too
    after     one kernel reads x and residual, and writes norm(h) and h

The kernel rounds h to its dtype and normalizes the rounded h, so all results have the bits of the unfused graph.

Bytes per element in the forward of a Llama block, whose second norm has its residual add in the same graph. fp32: a
residual stream of fp32 beside linears in bf16 (fp32 weights under autocast). bf16: a stream of bf16 (FSDP's mixed
precision). The norm writes bf16 images.

    stream   add: reads, writes   norm: reads, writes   sum   fused: reads, writes
    fp32     4 + 2, 4             4, 2                  16    4 + 2, 4 + 2   12
    bf16     2 + 2, 2             2, 2                  10    2 + 2, 2 + 2    8

The kernel reads both summands from memory. Without the fusion, Inductor computes a summand inside its own addition if
only pointwise operations produce and use the summand. Storing such a summand for the kernel costs at least as much as
the fusion saves, so these graphs stay unfused. In Llama both summands are in memory: x is the block's input, and
residual is a matrix product.

The pass works on the graphs after PyTorch has split forward and backward, so a block that is computed again in the
backward is fused there, too.
"""

import operator

import torch
from torch.fx import Graph, Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from mxtrain.compile.nodes import CONVERT, as_matrix, describe_call, final_users, without_views
from mxtrain.formats.format import FORMATS

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
