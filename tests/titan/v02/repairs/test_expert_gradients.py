"""Repair of 0.2.2: gradients of mixtures of experts under tensor and expert parallelism, and what is refused."""

import pytest
import torch.nn as nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel
from torchtitan.distributed import NoParallel
from torchtitan.distributed.expert_parallel import ExpertParallel, ExpertTensorParallel, TensorParallel
from torchtitan.models.moe.moe import GroupedExperts

from mxtrain import ConfigError
from mxtrain.nn.experts import QuantizedExperts
from mxtrain.titan.v02.repairs import expert_gradients
from mxtrain.titan.v02.repairs.expert_gradients import inner_style
from tests.parallel.test_tensor_parallel import COMPILED
from tests.support import oracle

SIZES = {"n_layers": 2, "dim": 128, "n_heads": 4, "n_kv_heads": 2, "head_dim": 32, "hidden_dim": 256}
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
        '{from_step = 5, norm = "rmsnorm"}',
    ],
    # The shared experts of one layer are quantized, those of another are not.
    "shared experts, mx_linear": [
        "--model.name=deepseek_v3",
        "--model_args.n_layers=3",
        "--model.converters=mx_linear",
        "--mxnorm.filter_fqns=output,attention,layers.1",
    ],
    "tied head, unquantized": [
        "--model.name=qwen3",
        "--model.flavor=debugmodel",
        *(f"--model_args.{name}={size}" for name, size in SIZES.items()),
        "--mxnorm.recipe=unquantized",
    ],
}
LAYOUTS = {
    2: {
        "tensor 2, experts in its place, experts, unquantized": [*oracle.layout(tensor=2, expert=2), *COMPILED],
        "tensor 2, shared experts, mx_linear": oracle.layout(tensor=2),
        "tensor 2, experts, mxfp8": oracle.layout(tensor=2),
        "tensor 2, experts in its place, experts, mxfp8": [*oracle.layout(tensor=2, expert=2), *COMPILED],
        "expert 2, experts, mxfp8": oracle.layout(shard=2, expert=2),
        "expert 2, values sent, experts, mxfp8": [
            *oracle.layout(shard=2, expert=2),
            "--mxnorm.dispatch=high_precision",
        ],
        "expert 2, experts, unquantized": oracle.layout(shard=2, expert=2),
        "tensor 2, tied head, unquantized": oracle.layout(tensor=2, accumulate=2),
    },
    4: {
        "tensor 2 x expert 2, experts, unquantized": [
            *oracle.layout(tensor=2, shard=2, expert=2, expert_tensor=2),
            *COMPILED,
        ],
        "tensor 2 x expert 2, experts, mxfp8": [
            *oracle.layout(tensor=2, shard=2, expert=2, expert_tensor=2),
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
    pairs = {
        NoParallel: "Replicated",
        ColwiseParallel: "InnerColumnwise",
        RowwiseParallel: "InnerRowwise",
        TensorParallel: "SplitExperts",
        ExpertTensorParallel: "ExchangedSplitExperts",
        ExpertParallel: "CodesExpertParallel",
    }
    for theirs, ours in pairs.items():
        assert type(inner_style(style := theirs())) is getattr(expert_gradients, ours) and type(style) is theirs
    other = object()
    assert inner_style(other) is other


class Mesh:
    """The sizes of a mesh. Nothing else is read before a refusal."""

    def __init__(self, **sizes: int):
        self._sizes = sizes

    def __getitem__(self, name: str) -> "Mesh":
        return Mesh(**{name: self._sizes[name]})

    def size(self) -> int:
        (size,) = self._sizes.values()
        return size


@pytest.mark.parametrize(
    "style, mesh", [(TensorParallel, Mesh(tp=4)), (ExpertTensorParallel, Mesh(ep=2, etp=4))], ids=["alone", "exchanged"]
)
def test_features_that_no_grouped_product_takes_are_refused(style, mesh):
    message = "tensor_parallel_degree = 4 splits the 48 hidden features of every expert .* a divisor of 6$"
    with pytest.raises(ConfigError, match=message):
        inner_style(style())._apply(GroupedExperts(64, 48, 2, use_grouped_mm=False), mesh)


def test_parts_of_quantized_experts_are_whole_blocks():
    experts = QuantizedExperts.from_experts(GroupedExperts(64, 96, 2, use_grouped_mm=False))
    message = "tensor_parallel_degree = 2 splits the 96 hidden features .* blocks of 32 .* a divisor of 3$"
    with pytest.raises(ConfigError, match=message):
        inner_style(TensorParallel())._apply(experts, Mesh(tp=2))


class OwnLinear(nn.Linear):
    pass


@pytest.mark.parametrize("style", [NoParallel, ColwiseParallel, RowwiseParallel])
def test_linears_with_unknown_gradients_are_refused(style):
    with pytest.raises(
        ConfigError, match="tensor_parallel_degree = 2 does not know the gradients of OwnLinear .* is 1$"
    ):
        inner_style(style())._apply(OwnLinear(8, 8, bias=False), Mesh(tp=2))


def test_a_bias_that_every_process_would_add_is_refused():
    message = (
        "tensor_parallel_degree = 2 splits a linear with a bias .* every process would add the bias: allowed is 1$"
    )
    with pytest.raises(ConfigError, match=message):
        inner_style(RowwiseParallel())._apply(nn.Linear(8, 8), Mesh(tp=2))
