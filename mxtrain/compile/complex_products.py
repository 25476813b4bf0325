"""A pass that writes products of complex numbers as operations on their real and imaginary parts.

TorchTitan rotates queries and keys as complex numbers (Llama 3, Llama 4, DeepSeek V3). Inductor generates no code for
complex numbers. It calls PyTorch's kernel for the product, whose operands and result are then stored in fp32. The
operations on parts become one generated kernel, together with the conversions before and after them.

Bytes per element of queries and keys, in the forward and again in the backward:

    before    bf16 to fp32: 2 + 4    product: 4 + 4    fp32 to bf16: 4 + 2    20
    after     2 + 2                                                            4

A result may differ from PyTorch's in the last bits of fp32, where another multiplication is rounded together with the
addition after it.

The pass works on the joint graph, so the gradient of a product, which is a product, too, is found in the same way.
"""

import torch
from torch.fx import Graph, Node

aten, prims = torch.ops.aten, torch.ops.prims
_AS_COMPLEX, _AS_REAL = aten.view_as_complex.default, aten.view_as_real.default


def split_complex_products(graph: Graph) -> None:
    """Replace complex64 products with a factor that is made of parts, and with users that read only parts."""
    for product in list(graph.find_nodes(op="call_function", target=aten.mul.Tensor)):
        if factors := _pairs_and_number(product):
            _split(graph, product, *factors)
    graph.eliminate_dead_code()


def _pairs_and_number(product: Node) -> tuple[Node, Node] | None:
    """Return one factor as real pairs [..., 2] and the other as a complex number. None: the product must stay."""
    if not _is_complex(product) or {user.target for user in product.users} != {_AS_REAL}:
        return None
    for one, other in (product.args, product.args[::-1]):
        if _is_complex(one) and _is_complex(other) and one.target is _AS_COMPLEX:
            fits = one.meta["val"].shape == product.meta["val"].shape
            # PyTorch marks conjugates instead of computing them, and refuses to read the parts of a marked tensor.
            is_marked = _without_conjugation(other)[0].meta["val"].is_conj()
            return (one.args[0], other) if fits and not is_marked else None
    return None


def _is_complex(node: object) -> bool:
    value = node.meta.get("val") if isinstance(node, Node) else None
    return isinstance(value, torch.Tensor) and value.dtype == torch.complex64


def _split(graph: Graph, product: Node, pairs: Node, number: Node) -> None:
    """Compute the parts of (a + ib)(c + id), which are ac - bd and bc + ad, from pairs (a, b) and the number."""

    def call(operation, *args) -> Node:
        node = graph.call_function(operation, args)
        # The product's metadata tells the partitioner whether the node may be kept for the backward.
        node.meta = {**product.meta, "val": operation(*torch.fx.map_arg(args, lambda n: n.meta["val"]))}
        return node

    number, is_conjugate = _without_conjugation(number)
    with graph.inserting_before(product):
        parts = call(_AS_REAL, number)
        c, d = call(aten.slice.Tensor, parts, -1, 0, 1), call(aten.slice.Tensor, parts, -1, 1, 2)
        minus_d = call(aten.neg.default, d)
        signed = call(aten.cat.default, [d, minus_d] if is_conjugate else [minus_d, d], -1)
        # Both parts of the result by the same operations: a concatenation of two results would compute both for each.
        swapped = call(prims.rev.default, pairs, [pairs.meta["val"].ndim - 1])
        result = call(aten.add.Tensor, call(aten.mul.Tensor, pairs, c), call(aten.mul.Tensor, swapped, signed))
    for user in list(product.users):
        user.replace_all_uses_with(result)


def _without_conjugation(number: Node) -> tuple[Node, bool]:
    """Return what ``number`` is a conjugate or a copy of, and whether it is a conjugate."""
    is_conjugate = False
    while number.target in (aten._conj.default, aten.clone.default):
        is_conjugate ^= number.target is aten._conj.default
        number = number.args[0]
    return number, is_conjugate
