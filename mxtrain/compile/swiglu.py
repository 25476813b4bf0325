"""A pass that puts kernels of SwiGLU with casts in the place of SwiGLU followed by casts, in formats that have them.

A gated feed-forward computes w2(h) with h = silu(gate) * up, gate = w1(x), up = w3(x). Its graph holds SwiGLU as
pointwise operations, and the casts of h and of the gradients of gate and up as operations ``mxtrain::cast``.

The pass works on the joint graph of forward and backward, where h is one tensor for both. The fused backward computes
the cast of h along columns from gate and up, which the backward needs in any case. So the forward keeps neither h nor
its casts. After PyTorch has split the graph, a cast of h can no longer move from the forward to the backward.

A cast is replaced only if nothing but casts reads its input: otherwise SwiGLU's result is stored in any case. Casts
that ``Fusions.is_fused`` leaves out read a result that the backward computes and stores.

Nothing is replaced with ``torch._inductor.config.emulate_precision_casts = True``, which asks for the roundings of
eager mode: the kernels do not round between operations.
"""

import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch._inductor import config
from torch.fx import Graph, Node

from mxtrain.compile.nodes import Chain, as_matrix, describe_call, final_users, that_depend_on_tangents, without_views
from mxtrain.formats.ops import Fusions
from mxtrain.formats.recipe import FORMATS
from mxtrain.formats.swiglu import swiglu, swiglu_backward

aten = torch.ops.aten
_DTYPES = (torch.bfloat16, torch.float32)


class _Product(NamedTuple):
    """Casts of silu(gate) * factor: h if the factor is up, dup if it is dh."""

    gate: Node
    factor: Node
    casts: list[Node]


class _Gradient(NamedTuple):
    """Casts of dgate, or of [dgate, dup]. dgate is symmetric in dh and up, which are the ``factors``."""

    gate: Node
    factors: frozenset[Node]
    casts: list[Node]
    dup: _Product | None = None


def fuse_swiglu(graph: Graph) -> None:
    """Replace SwiGLU and its gradients, where only casts use them, by kernels that write the casts."""
    if config.emulate_precision_casts:
        return
    block_sizes = {fmt.ops.fusions: fmt.block_size for fmt in FORMATS.values() if fmt.ops.fusions}
    for ops, block_size in block_sizes.items():
        _fuse(graph, block_size, ops)


def _fuse(graph: Graph, block_size: int, ops: Fusions) -> None:
    sources = _sources(graph, ops.cast)
    found = [match for parts, casts in sources.items() if (match := _match(parts, casts, block_size))]
    products = {(match.gate, match.factor): match for match in found if isinstance(match, _Product)}
    if not found:
        return
    backward = that_depend_on_tangents(graph)
    place = {node: i for i, node in enumerate(graph.nodes)}
    done: set[Node] = set()
    for gradient in found:
        if isinstance(gradient, _Gradient) and len(gradient.factors & backward) == 1:
            done |= _fuse_backward(graph, ops, gradient, products, backward, place)
    for gate, factor, casts in products.values():
        for cast in casts:
            if factor not in backward and cast not in done and ops.is_fused(cast.args[-4], cast.args[-1]):
                _replace(graph, ops.swiglu, (gate, factor), cast.args[-5:], [cast], cast)
    graph.eliminate_dead_code()


def _fuse_backward(
    graph: Graph, ops: Fusions, gradient: _Gradient, products: dict, backward: set[Node], place: dict
) -> set[Node]:
    """Fuse the casts of dgate and dup, and the cast of h along columns if there is one; return the casts replaced."""
    (dh,) = gradient.factors & backward
    (up,) = gradient.factors - backward
    gate, (cast, *more) = gradient.gate, gradient.casts
    dup = gradient.dup or products.get((gate, dh))
    if more or dup is None or (dup.gate, dup.factor) != (gate, dh):
        return set()
    casts = [cast, *dup.casts]
    along_rows, along_columns, element, rounding, form = settings = cast.args[-5:]
    if gradient.dup is None and [c.args[-5:] for c in dup.casts] != [settings]:
        return set()
    if not ops.is_fused(along_columns, form):
        return set()
    # The kernel reads dh, so the cast of h must come after dh: nothing that leads to dh may need this cast.
    h = [
        c
        for c in (products[gate, up].casts if (gate, up) in products else ())
        # Its elements may be others than those of gradients.
        if c.args[-5:] == (False, True, c.args[-3], rounding, form) and place[c] > place[dh]
    ][:1]
    first = min([*casts, *h], key=place.__getitem__)
    if any(place[n] > place[first] for n in (dh, gate, up)):
        return set()
    h_element = h[0].args[-3] if h else element
    settings = (along_rows, along_columns, bool(h), gradient.dup is not None, h_element, element, rounding, form)
    _replace(graph, ops.swiglu_backward, (dh, gate, up), settings, [*casts, *h], first)
    return {*casts, *h}


def _replace(graph: Graph, op, matrices: Iterable[Node], settings: tuple, casts: list[Node], before: Node) -> None:
    """Insert ``op`` before a node. Its results replace the results of ``casts``, in their order."""
    with graph.inserting_before(before):
        new = graph.call_function(op, (*(as_matrix(graph, m) for m in matrices), *settings))
    # The first cast's metadata tells the partitioner whether the call is part of the backward, and may be kept.
    describe_call(new, casts[0], [value for cast in casts for value in cast.meta["val"]])
    first = 0
    for cast in casts:
        for result in list(cast.users):
            result.args = (new, first + result.args[1])
        first += len(cast.meta["val"])
        graph.erase_node(cast)


def _sources(graph: Graph, cast: Callable) -> dict[tuple[Node, ...], list[Node]]:
    """Return {tensors side by side: their casts} for the tensors that nothing but these casts uses."""
    sources: dict[tuple[Node, ...], list[Node]] = {}
    for node in graph.nodes:
        if parts := _parts(node, cast):
            sources.setdefault(parts, []).append(node)
    return {
        parts: casts
        for parts, casts in sources.items()
        if all(_readers(part) == {*casts} for part in parts)
        and all(user.target is operator.getitem for cast in casts for user in cast.users)
    }


def _parts(node: Node, cast: Callable) -> tuple[Node, ...]:
    """Return the tensors, usually one, that a plain cast reads side by side; none for other nodes."""
    if node.target is not cast or node.args[2:6] != (None, None, None, False) or node.args[7]:
        return ()
    parts, axis = node.args[:2]
    if len(parts) > 1:
        return tuple(map(without_views, parts)) if axis == 1 else ()
    source = without_views(parts[0])
    if source.target is aten.cat.default and source.args[1:] in ((-1,), (source.meta["val"].ndim - 1,)):
        return tuple(without_views(part) for part in source.args[0])
    return (source,)


def _readers(part: Node) -> set[Node]:
    """Return the users of a tensor, and of a concatenation that it is a part of."""
    users = final_users(part)
    return {r for user in users for r in (final_users(user) if user.target is aten.cat.default else (user,))}


def _match(parts: tuple[Node, ...], casts: list[Node], block_size: int) -> _Product | _Gradient | None:
    """Recognize SwiGLU or its gradient in the tensors that are cast. Two tensors side by side are [dgate, dup]."""
    if len(parts) == 2 and parts[0].meta["val"].shape[-1] % block_size == 0:  # no block holds both
        dgate, dup = (_match((part,), [], block_size) for part in parts)
        if isinstance(dgate, _Gradient) and isinstance(dup, _Product):
            return dgate._replace(casts=casts, dup=dup)
    if len(parts) > 1:
        return None
    chain = Chain(*parts)
    dtypes = {node.meta["val"].dtype for node in (*parts, *chain.inputs)}
    if len(dtypes) > 1 or not dtypes <= {*_DTYPES}:
        return None
    for gate in chain.inputs:
        factors = [node for node in chain.inputs if node is not gate]
        if len(factors) == 1 and chain.computes(swiglu, gate, *factors):
            return _Product(gate, *factors, casts)
        if len(factors) == 2 and chain.computes(lambda gate, up, dh: swiglu_backward(dh, gate, up)[0], gate, *factors):
            return _Gradient(gate, frozenset(factors), casts)
    return None
