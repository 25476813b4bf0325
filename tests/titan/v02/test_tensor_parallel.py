"""Styles for swapped modules, right gradients within experts, heads of Qwen3."""

from types import SimpleNamespace

import pytest
import torch.nn as nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torchtitan.distributed import NoParallel
from torchtitan.distributed.expert_parallel import ExpertParallel, TensorParallel
from torchtitan.models.moe.moe import GroupedExperts

from mxtrain import ConfigError, MXLinear, MXNorm, MXNormLinear
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.titan.v02.tensor_parallel import (
    CodesExpertParallel,
    Columnwise,
    GatheringNorm,
    Inner,
    Rowwise,
    SplitExperts,
    inner_style,
    style_for,
    with_local_heads,
)
from tests.parallel.test_tensor_parallel import COMPILED
from tests.support import oracle

TWO_PROCESSES = SimpleNamespace(size=lambda: 2)
"""In the place of a mesh, which takes a process group"""


def linear(kind=MXLinear) -> MXLinear:
    return kind(128, 192, bias=False, device="meta")


def test_styles_follow_the_swapped_modules():
    norm = MXNorm(128, device="meta")

    def own(module, style):
        return style_for("layer.part", module, style, TWO_PROCESSES)

    assert type(own(norm, SequenceParallel())) is GatheringNorm
    column = own(linear(MXNormLinear), ColwiseParallel(use_local_output=False))
    assert type(column) is Columnwise and not column.use_local_output
    row = own(linear(), RowwiseParallel(output_layouts=Shard(1)))
    assert type(row) is Rowwise and row.output_layouts == (Shard(1),)
    for kept in (nn.RMSNorm(8), nn.Linear(8, 8), None):
        assert own(kept, style := RowwiseParallel()) is style

    plan = PrepareModuleInput(input_layouts=(Shard(1), Shard(0)), desired_input_layouts=(Shard(0), Shard(0)))
    attention = nn.ModuleDict({"wq": linear(MXNormLinear)})
    assert own(attention, plan).input_layouts == (None, Shard(0)) and plan.input_layouts == (Shard(1), Shard(0))
    assert own(nn.ModuleDict({"wq": linear()}), plan) is plan, "its norm gives tensors"
    with pytest.raises(ConfigError, match="degree = 2 splits layer.part, an MXNorm, by PrepareModuleInput, which"):
        own(norm, plan)


MODELS = {
    "experts, unquantized": [
        "--model.name=qwen3",
        "--model.converters=mxnorm,fused_norm,decompose_k_router",
        "--mxnorm.recipe=unquantized",
    ],
    "experts, mxfp8": [
        "--model.name=qwen3",
        "--model.converters=mxnorm,decompose_k_router",
        "--mxnorm.schedule",
        '{from_step = 3, norm = "rmsnorm"}',
    ],
    # The shared experts of one layer are quantized, those of another are not.
    "shared experts, mx_linear": [
        "--model.name=deepseek_v3",
        "--model_args.n_layers=3",
        "--model.converters=mx_linear",
        "--mxnorm.filter_fqns=output,attention,layers.1",
    ],
}
LAYOUTS = {
    2: {
        "tensor 2, shared experts, mx_linear": oracle.layout(tensor=2),
        "tensor 2, experts in its place, experts, mxfp8": [*oracle.layout(tensor=2, expert=2), *COMPILED],
        "expert 2, experts, mxfp8": oracle.layout(shard=2, expert=2),
        "expert 2, values sent, experts, mxfp8": [
            *oracle.layout(shard=2, expert=2),
            "--mxnorm.dispatch=high_precision",
        ],
    },
    4: {
        "tensor 2 x expert 4, experts, mxfp8": [
            *oracle.layout(tensor=2, shard=2, expert=4),
            "--activation_checkpoint.mode=selective",
        ],
        "pipeline 2 x tensor 2, experts in its place, experts, unquantized": oracle.layout(
            pipeline=2, tensor=2, expert=2
        ),
    },
}
ONE = "one process beside experts"


def model_of(name: str) -> str:
    return next(model for model in MODELS if name.endswith(f", {model}"))


def flags(base, name: str, layout: list[str]) -> list[str]:
    model = model_of(name)
    follow = [] if model.endswith("unquantized") else oracle.follow(base, model, ONE)
    return [*layout, *MODELS[model], *follow]


def one_process(base) -> dict[str, oracle.Training]:
    return oracle.train(base, ONE, 1, {model: [*oracle.layout(), *own] for model, own in MODELS.items()})


def several(base, processes: int) -> dict[str, oracle.Training]:
    runs = {name: flags(base, name, layout) for name, layout in LAYOUTS[processes].items()}
    return oracle.train(base, f"experts and tensor parallelism on {processes}", processes, runs)


@pytest.mark.sweep
@pytest.mark.parametrize("processes, name", [(processes, name) for processes in LAYOUTS for name in LAYOUTS[processes]])
def test_gradients_match_one_process(base, processes, name):
    one = one_process(base)[model_of(name)]
    oracle.require_match(one, several(base, processes)[name], model_of(name).rpartition(", ")[2])


@pytest.mark.sweep
def test_gradients_of_experts_with_shards_match_one_process(base):
    """In processes of its own, because PyTorch 2.13 keeps plans for gathering shards over meshes that are gone."""
    one, name = one_process(base)["experts, mxfp8"], "expert 2 x shards, experts, mxfp8"
    runs = {name: flags(base, name, oracle.layout(shard=4, expert=2))}
    oracle.require_match(one, oracle.train(base, "experts with shards on 4", 4, runs)[name], "mxfp8")


@pytest.mark.sweep
def test_codes_in_the_dispatch_change_no_bit_of_a_training(base):
    one_process(base)
    found = several(base, 2)
    oracle.compare(found["expert 2, experts, mxfp8"], found["expert 2, values sent, experts, mxfp8"], 0.0)


def test_inner_styles_leave_gradients_in_parts():
    pairs = {TensorParallel: SplitExperts, ExpertParallel: CodesExpertParallel}
    for theirs in (NoParallel, ColwiseParallel, RowwiseParallel, *pairs):
        assert type(inner_style(theirs())) is pairs.get(theirs, Inner)
    other = object()
    assert inner_style(other) is other


def test_features_that_no_grouped_product_takes_are_refused():
    experts = GroupedExperts(64, 48, 2, use_grouped_mm=False)
    message = "tensor_parallel_degree = 4 splits the 48 hidden features of every expert .* a divisor of 6$"
    with pytest.raises(ConfigError, match=message):
        inner_style(TensorParallel())._apply(experts, SimpleNamespace(size=lambda: 4))


def test_parts_of_quantized_experts_are_whole_blocks():
    experts = QuantizedExperts.from_experts(GroupedExperts(64, 96, 2, use_grouped_mm=False))
    message = "tensor_parallel_degree = 2 splits the 96 hidden features .* blocks of 32 .* a divisor of 3$"
    with pytest.raises(ConfigError, match=message):
        inner_style(TensorParallel())._apply(experts, TWO_PROCESSES)


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
