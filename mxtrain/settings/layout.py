"""Mistakes in a layout of processes that show without the model: degrees, sequences, batches.

``mxtrain.settings.pipeline`` has those of pipelines. ``mxtrain.titan.check_layout`` compares a layout with the
model.
"""

import math

from mxtrain.settings.relations import Relation, quantizing
from mxtrain.settings.values import Settings

BLOCK = 32
"""Largest number of elements along an axis that share a scale"""


def degree(s: Settings, kind: str) -> int:
    return s[f"parallelism.{kind}_parallel_degree"]


def global_batch_size(s: Settings, processes: int) -> int:
    """Return the sequences per step in effect, over all processes and microbatches."""
    given = s["training.global_batch_size"]
    return s["training.local_batch_size"] * _readers(s, processes) if given == -1 else given


def beside_batch(s: Settings, processes: int, sequences: int) -> str:
    """Say what makes a step of so many sequences possible on these processes; empty if the settings already do."""
    readers, local = _readers(s, processes), s["training.local_batch_size"]
    if sequences % readers:
        return f"take a number of data-parallel processes that divides {sequences}"
    fitting = next(size for size in range(local, 0, -1) if sequences // readers % size == 0)
    return "" if fitting == local else f"set training.local_batch_size to {fitting}"


def _shards(s: Settings, processes: int) -> int:
    """The number of shards that ``data_parallel_shard_degree`` stands for; 0 if the other degrees leave none."""
    given = s["parallelism.data_parallel_shard_degree"]
    others = s["parallelism.data_parallel_replicate_degree"] * _other_degrees(s)
    return processes // others if given == -1 else given


def _other_degrees(s: Settings) -> int:
    return degree(s, "tensor") * degree(s, "pipeline") * degree(s, "context")


def _readers(s: Settings, processes: int) -> int:
    """The number of processes that read different text."""
    return s["parallelism.data_parallel_replicate_degree"] * _shards(s, processes)


def _sequence_problem(s: Settings, length: int, needs_blocks: bool) -> str | None:
    """What is wrong with the length of a sequence that context and tensor parallelism cut into parts.

    Context parallelism cuts it into twice as many chunks as ranks, and gives every rank two. Every chunk must hold
    whole blocks of tokens: the operands of wgrad have one scale for a block. Tensor parallelism gathers the chunks
    before they are cast.
    """
    context, tensor = degree(s, "context"), degree(s, "tensor")
    if context * tensor == 1:
        return None
    needs_blocks &= context > 1
    divisor = 2 * context * (math.lcm(tensor, BLOCK) if needs_blocks else tensor)
    if length % divisor == 0:
        return None
    blocks = f" with blocks of {BLOCK} tokens" if needs_blocks else ""
    return (
        f"is not a multiple of {divisor}, which parallelism.context_parallel_degree = {context} and "
        f"tensor_parallel_degree = {tensor} need{blocks}"
    )


def _gather_problem(s: Settings) -> str | None:
    """What is wrong with sending codes between norms and linears that tensor parallelism splits."""
    tensor, context = degree(s, "tensor"), degree(s, "context")
    if tensor == 1 or not quantizing(s) or s["mxnorm.gather"] != "quantized":
        return None
    if "mxnorm" not in s["model.converters"]:
        return f"needs converter 'mxnorm', not {quantizing(s)[0]!r}, whose norms send no codes; allowed is 'auto'"
    for name in ("training", "validation") if s["validation.enable"] else ("training",):
        length = s[f"{name}.seq_len"]
        if length % (context * tensor * BLOCK):
            return (
                f"needs whole blocks of {BLOCK} tokens on each of {context * tensor} processes, tensor_parallel_degree "
                f"times context_parallel_degree, and {name}.seq_len = {length} is not a multiple of "
                f"{context * tensor * BLOCK}; allowed is 'auto'"
            )
    return None


def _cut_experts(s: Settings, processes: int) -> str | None:
    """What is wrong with the degree of expert parallelism."""
    experts, own = degree(s, "expert"), degree(s, "expert_tensor")
    ranks = _shards(s, processes) * degree(s, "context") * degree(s, "tensor")
    if experts == 1 or ranks % (experts * own) == 0:
        return None
    return (
        f"times expert_tensor_parallel_degree = {own} does not divide {ranks}, the product of the degrees shard, "
        "context and tensor"
    )


RELATIONS = (
    Relation(
        "parallelism.data_parallel_shard_degree",
        lambda s, machine: (
            _readers(s, machine.processes) * _other_degrees(s) != machine.processes
            and f"does not fit {machine.processes} process(es), which the product of all degrees must be; the others "
            f"are replicate {s['parallelism.data_parallel_replicate_degree']}, tensor {degree(s, 'tensor')}, "
            f"pipeline {degree(s, 'pipeline')} and context {degree(s, 'context')}"
        ),
    ),
    # On a CPU, PyTorch 2.13 misplaces the state of the random numbers among the results of such a graph.
    Relation(
        "compile.enable",
        lambda s, machine: (
            s["compile.enable"]
            and degree(s, "tensor") > 1
            and s["activation_checkpoint.mode"] != "none"
            and not machine.has_gpus
            and f"with parallelism.tensor_parallel_degree = {degree(s, 'tensor')} and activation_checkpoint.mode = "
            f"{s['activation_checkpoint.mode']!r}: PyTorch 2.13 compiles no such layers on a CPU; set "
            "activation_checkpoint.mode = 'none'"
        ),
    ),
    # On a CPU, PyTorch 2.13 then computes a wrong loss without an error, also for a model without a converter.
    Relation(
        "compile.components",
        lambda s, machine: (
            s["compile.enable"]
            and "loss" in s["compile.components"]
            and s["compile.backend"] == "inductor"
            and degree(s, "tensor") > 1
            and not s["parallelism.disable_loss_parallel"]
            and not machine.has_gpus
            and f"with parallelism.tensor_parallel_degree = {degree(s, 'tensor')}: PyTorch 2.13 compiles a wrong loss "
            "on a CPU; set compile.components = ['model'] or parallelism.disable_loss_parallel = true"
        ),
    ),
    Relation(
        "parallelism.enable_async_tensor_parallel",
        lambda s, machine: (
            s["parallelism.enable_async_tensor_parallel"]
            and quantizing(s)
            and f"finds no products to overlap with converter {quantizing(s)[0]!r}: allowed is false"
        ),
    ),
    Relation(
        "parallelism.enable_async_tensor_parallel",
        lambda s, machine: (
            s["parallelism.enable_async_tensor_parallel"]
            and not (s["compile.enable"] and "model" in s["compile.components"])
            and "needs compile.enable = true, and 'model' in compile.components"
        ),
    ),
    Relation("mxnorm.gather", lambda s, machine: _gather_problem(s)),
    Relation("parallelism.expert_parallel_degree", lambda s, machine: _cut_experts(s, machine.processes)),
    Relation(
        "parallelism.expert_tensor_parallel_degree",
        lambda s, machine: (
            degree(s, "expert_tensor") not in (1, degree(s, "tensor"))
            and f"is neither 1 nor tensor_parallel_degree = {degree(s, 'tensor')}"
        ),
    ),
    Relation(
        "training.seq_len",
        lambda s, machine: (
            _sequence_problem(s, s["training.seq_len"], bool(quantizing(s)))
            or (s["training.seq_len"] % 2 and "is odd, and TorchTitan's models take even numbers")
        ),
    ),
    Relation(
        "validation.seq_len",
        lambda s, machine: s["validation.enable"] and _sequence_problem(s, s["validation.seq_len"], needs_blocks=False),
    ),
    Relation(
        "training.global_batch_size",
        lambda s, machine: (
            s["training.global_batch_size"] != -1
            and s["training.global_batch_size"] % (s["training.local_batch_size"] * _readers(s, machine.processes))
            and f"is not a multiple of training.local_batch_size = {s['training.local_batch_size']} times "
            f"{_readers(s, machine.processes)} data-parallel process(es); to keep it, "
            f"{beside_batch(s, machine.processes, s['training.global_batch_size'])}"
        ),
    ),
)
