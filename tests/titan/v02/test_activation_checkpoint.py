"""What a layer keeps for its backward with selective activation checkpointing, and what it computes again."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torchtitan.config.job_config import ActivationCheckpoint
from torchtitan.distributed.activation_checkpoint import apply_ac
from torchtitan.models.llama3 import llama3_args
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

import mxtrain
from mxtrain.formats import hardware
from mxtrain.formats.gemm import guarded_mm
from mxtrain.formats.mx.merged import merged_mm
from mxtrain.parallel.activation_checkpoint import (
    knows_own_operations,
    multiply_one_by_one,
)
from mxtrain.rng.rounding import set_rounding_step
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.parallelize import Layout, checked_parallelize
from tests.support.graph_checks import Calls

TOKENS = 8192
MIB = 2**20
AMAX, SCALED, MM = (
    torch.ops.mxtrain.nvfp4_tensor_scales.default,
    torch.ops.aten._scaled_mm_v2.default,
    torch.ops.aten.mm.default,
)
# Of a layer of Llama 3 8B in bf16: input, wq, wv, attention, w1; statistics of attention and the rotary embedding.
KEPT_BF16 = 2 * TOKENS * (4096 + 4096 + 1024 + 4096 + 14336) + 4 * TOKENS * 32 + 2 * TOKENS * 64
TINY = TransformerModelArgs(dim=64, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=64, multiple_of=64, max_seq_len=32)


class Captured(Exception):
    pass


def model_of(args, converter: str, recipe: str, mode: str, checkpointing: str = "selective") -> Transformer:
    """A model on the meta device, with its layers wrapped as TorchTitan does."""
    with torch.device("meta"):
        model = Transformer(args)
    if converter:
        settings = {"high_precision_share": 0.0} if "nvfp4" in recipe else {}
        mxtrain.convert(model, converter, recipe=recipe, mode=mode, **settings)
    if checkpointing != "none":
        config = ActivationCheckpoint(mode=checkpointing, selective_ac_option="op")
        with knows_own_operations():
            apply_ac(model, config, op_sac_save_list=_op_sac_save_list)
        if checkpointing == "selective":
            multiply_one_by_one(model)
    return model


def partition(model: Transformer, length: int) -> tuple[int, Counter, Counter]:
    """Compile the first layer. Return the bytes kept for its backward, and the calls in forward and backward graph.

    Weights do not count. Nothing is computed: the compilation ends where the graph is cut in two.
    """
    model.to_empty(device="cpu").to(torch.bfloat16)
    weights, found = {p.shape for p in model.parameters()}, []

    def cut(joint, inputs, *, num_fwd_outputs, **others):
        graphs = min_cut_rematerialization_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **others)
        values = [n.meta["val"] for n in graphs[0].graph.output_node().args[0][num_fwd_outputs:]]
        kept = sum(v.nbytes for v in values if isinstance(v, torch.Tensor) and v.shape not in weights)
        found.extend([kept, *(Counter(node.target for node in graph.graph.nodes) for graph in graphs)])
        raise Captured

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=lambda graph, inputs: graph, partition_fn=cut)
    layer = torch.compile(model.layers["0"], backend=backend, fullgraph=True)
    x = torch.empty(1, length, model.model_args.dim, dtype=torch.bfloat16, requires_grad=True)
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="Captured"):
        layer(x, torch.empty(length, model.freqs_cis.shape[1], dtype=torch.bfloat16), None)
    return found


@pytest.fixture
def any_mode(monkeypatch):
    """All modes are available: nothing is computed."""
    monkeypatch.setattr(hardware, "_available", lambda device_type: list(hardware.MODES))
    hardware._cached_mode.cache_clear()
    yield
    hardware._cached_mode.cache_clear()


# Products and largest magnitudes in the backward: two products per linear, and three that are computed again (wk, wo,
# w3). NVFP4 reads the dY of each group of linears once and X along tokens four times. It reads no W: those scales are
# kept, as are those of X along features.
CASES = [
    (("mxnorm", "mxfp8", "native"), SCALED, 0),
    (("mxnorm", "mxfp8", "fp8_merged"), merged_mm, 0),
    (("mxnorm", "nvfp4", "emulated"), MM, 8),
    (("", "", ""), MM, 0),
]


@pytest.mark.sweep
@pytest.mark.parametrize(("kind", "product", "maxima"), CASES, ids=str)
def test_a_compiled_layer_of_8b_keeps_what_a_bf16_layer_keeps(any_mode, kind, product, maxima):
    args = replace(llama3_args["8B"], n_layers=1, vocab_size=256, max_seq_len=TOKENS)
    kept, forward, backward = partition(model_of(args, *kind), TOKENS)
    assert forward[product] == 7 and backward[product] == (17 if kind == ("", "", "") else 11)
    assert backward[AMAX] == maxima
    assert 0 <= kept - KEPT_BF16 <= (0.5 * MIB if "nvfp4" in kind[1] else 0)


def gradients(kind: tuple, checkpointing: str, compiled: bool = False) -> tuple[dict[str, torch.Tensor], Counter]:
    """Gradients of a tiny bf16 layer and of its input, and the operations that the backward ran."""
    model = model_of(TINY, *kind, checkpointing)
    model.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)
    model.to(torch.bfloat16)
    x = torch.randn(1, 32, TINY.dim, generator=generator).to(torch.bfloat16).requires_grad_()
    layer = model.layers["0"]
    names = [name.replace("_checkpoint_wrapped_module.", "") for name, _ in layer.named_parameters()]
    if compiled:
        torch._dynamo.reset()
        layer = torch.compile(layer, backend="aot_eager_decomp_partition", fullgraph=True)
    set_rounding_step(1)
    y = layer(x, model._precompute_freqs_cis(), None)
    dy = torch.randn(y.shape, generator=generator).to(torch.bfloat16)
    with Calls() as calls:
        y.backward(dy)
    # Wrappers add parts to names, but change no order.
    return {"x": x.grad, **{name: p.grad for name, p in zip(names, layer.parameters(), strict=True)}}, calls.counts


REFERENCE = ("mxnorm", "mxfp8", "reference")


@pytest.fixture(scope="module")
def expected():
    found, calls = gradients(REFERENCE, "none")
    assert calls[guarded_mm] == 8
    return found


@pytest.mark.parametrize(
    ("checkpointing", "compiled", "products"),
    [
        ("selective", False, 11),
        ("full", False, 12),
        pytest.param("selective", True, 11, marks=pytest.mark.sweep),
    ],
)
def test_checkpointing_changes_no_gradient(expected, checkpointing, compiled, products):
    """wk, wo and w3 are multiplied again with "selective", all seven with "full"."""
    found, calls = gradients(REFERENCE, checkpointing, compiled)
    assert found.keys() == expected.keys() and len(found) == 10
    for name, gradient in expected.items():
        assert gradient.any() and torch.equal(found[name], gradient), name
    assert calls[guarded_mm] == products


def test_the_wrapper_of_parallelize_functions_makes_them_known():
    wrapped = []

    def parallelize(model, parallel_dims, job_config):
        wrapped.append(torch.utils.checkpoint.create_selective_checkpoint_contexts)
        raise Captured

    parallel_dims = Layout(dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, etp=1, world_size=1)
    with pytest.raises(Captured):
        checked_parallelize(parallelize)(torch.nn.Module(), parallel_dims, parse_job_config(["--model.converters="]))
    assert wrapped != [torch.utils.checkpoint.create_selective_checkpoint_contexts]
