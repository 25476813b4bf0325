"""A pass that lets the backward compute its own casts, instead of keeping their results from the forward.

Casts of inputs for wgrad and of weights for dgrad do not depend on gradients. PyTorch would compute many of them in the
forward, and hold the results of all layers at the same time. What they are made from is there in the backward anyway:

    a weight                 the parameter. A cast in tiles serves both passes, and keeps a tensor scale. Under
                             FSDP2, the results of all layers would be a second copy of the model, not sharded
    attention's output       its own backward reads it
    h = silu(gate) * up      the backward of SwiGLU reads gate and up, and computes h again beside their gradients

With activation checkpointing the graph says already what is computed again, and the pass changes nothing.
"""

import operator
from collections.abc import Sequence

import torch
from torch.fx import Graph, Node
from torch.utils.checkpoint import CheckpointPolicy

from mxtrain.compile.nodes import Chain, that_depend_on_tangents
from mxtrain.formats.recipe import FORMATS
from mxtrain.formats.swiglu import swiglu


def compute_casts_in_backward(graph: Graph) -> None:
    """Mark the casts that the backward uses, and the SwiGLU before them, to be computed there."""
    if any("recompute" in node.meta for node in graph.nodes):
        return
    casts = {op for fmt in FORMATS.values() for op in fmt.ops.casts}
    weight_casts = {op for fmt in FORMATS.values() for op in fmt.ops.weight_casts}
    fused_casts = {fmt.ops.fusions.swiglu for fmt in FORMATS.values() if fmt.ops.fusions}
    backward = that_depend_on_tangents(graph)
    for calls in _equal_calls(graph, casts | weight_casts | fused_casts):
        readers = {reader for call in calls for reader in _readers(call)}
        if calls[0].target in casts and len(calls[0].args[0]) > 1 and readers <= backward:
            continue  # casts of several matrices stay where PyTorch puts them, as when speed and memory were measured
        if backward.isdisjoint(calls) and not backward.isdisjoint(readers):
            fused = calls[0].target in fused_casts
            for node in {n for call in calls for n in (call, *(() if fused else _swiglu_before(call)))}:
                node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            for call in calls:
                if call.target in weight_casts and isinstance(call.args[1], Sequence):
                    for tensor_scale in call.args[1]:
                        tensor_scale.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def _equal_calls(graph: Graph, targets: set) -> list[list[Node]]:
    """Return the calls of ``targets``; calls with the same results, which PyTorch will merge, are in one list."""
    first_of: dict[str, Node] = {}
    stands_for: dict[Node, Node] = {}
    found: dict[Node, list[Node]] = {}
    for node in graph.nodes:
        first = node
        if node.op == "call_function":
            args = torch.fx.map_arg((node.args, node.kwargs), stands_for.__getitem__)
            first = first_of.setdefault(f"{node.target}{args}", node)
        stands_for[node] = first
        if node.target in targets:
            found.setdefault(first, []).append(node)
    return list(found.values())


def _readers(node: Node) -> set[Node]:
    """Return the nodes that read results of a call or views of them."""
    views = {u for u in node.users if u.target is operator.getitem or getattr(u.target, "is_view", False)}
    return (node.users.keys() - views).union(*map(_readers, views))


def _swiglu_before(cast: Node) -> set[Node]:
    """Return the operations that compute SwiGLU of two tensors in memory for ``cast``; none for another input."""
    if len(cast.args[0]) > 1:  # weights of a group
        return set()
    chain = Chain(*cast.args[0])
    if len(chain.inputs) != 2:
        return set()
    gate, up = chain.inputs
    return chain.operations if chain.computes(swiglu, gate, up) or chain.computes(swiglu, up, gate) else set()
