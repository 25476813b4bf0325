"""Repair of 0.2.2: Qwen3's norms of heads under tensor parallelism get local tensors."""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel

from mxtrain.titan.v02.repairs.qwen3_heads import with_local_heads


def plan(**norms):
    layouts = (Shard(1), Replicate(), None, Replicate())
    return {
        "attention": PrepareModuleInput(input_layouts=layouts, desired_input_layouts=(Replicate(), *layouts[1:])),
        "attention.wq": ColwiseParallel(use_local_output=False),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn.w1": ColwiseParallel(use_local_output=False),
        "ffn_norm": SequenceParallel(),
        **{f"attention.{name}": style for name, style in norms.items()},
    }


def test_attention_with_norms_of_heads_gets_local_tensors():
    given = plan(q_norm=SequenceParallel(sequence_dim=2))
    own = with_local_heads(given)
    assert own["attention"].input_layouts == (Shard(1), None, None, None)
    assert own["attention"].desired_input_layouts == (Replicate(), None, None, None)
    assert own["attention.wq"].use_local_output and own["attention.q_norm"].use_local_output
    assert not given["attention.wq"].use_local_output and not given["attention.q_norm"].use_local_output
    assert own["attention.wo"].output_layouts == (Shard(1),)
    assert all(own[name] is given[name] for name in ("ffn.w1", "ffn_norm"))


def test_plans_without_norms_of_heads_do_not_change():
    for given in (plan(), plan(q_norm=SequenceParallel())):
        assert with_local_heads(given) == given
