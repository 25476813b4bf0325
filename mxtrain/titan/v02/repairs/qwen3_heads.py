"""Fault: the plan of tensor parallelism gives Qwen3's attention DTensors. TorchTitan 0.3.0 has no such plans.

TorchTitan 0.2.2 normalizes Qwen3's queries and keys head by head as DTensors. So its attention gets DTensors, for which
PyTorch has no rule on a CPU. Every process has whole heads. Here all tensors between wq, wk, wv and wo are therefore
local, as in TorchTitan's plan for Llama. Only the two norms compute with DTensors, so that every process's part of the
gradient of their weights counts.
"""

import copy

from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, SequenceParallel
from torch.distributed.tensor.parallel.style import ParallelStyle

_HEADS = (Shard(2),)
"""Queries and keys are [B, S, heads, head_dim]"""


def with_local_heads(plan: dict[str, ParallelStyle]) -> dict[str, ParallelStyle]:
    """Return a plan in which attention modules with norms of heads compute on local tensors."""
    norms = [
        fqn for fqn, style in plan.items() if type(style) is SequenceParallel and style.sequence_sharding == _HEADS
    ]
    attentions = {fqn.rpartition(".")[0] for fqn in norms}
    return {fqn: _local(style) if attentions & {fqn, fqn.rpartition(".")[0]} else style for fqn, style in plan.items()}


def _local(style: ParallelStyle) -> ParallelStyle:
    new = copy.copy(style)
    if type(style) in (ColwiseParallel, SequenceParallel):
        new.use_local_output = True
    elif type(style) is PrepareModuleInput:
        # Rotary embeddings and positions stay plain tensors.
        rest = (None,) * (len(style.input_layouts) - 1)
        new.input_layouts = (style.input_layouts[0], *rest)
        new.desired_input_layouts = (style.desired_input_layouts[0], *rest)
    return new
