"""The bytes that ``mxtrain doctor`` names for FSDP are those that TorchTitan's FSDP gives to collectives."""

from functools import partial

import pytest
import torch
from torchtitan.models.llama3.infra.parallelize import apply_fsdp
from torchtitan.models.llama3.model.args import TransformerModelArgs
from torchtitan.models.llama3.model.model import Transformer

import mxtrain
from mxtrain.parallel.fsdp_gather import CodeGather, gathered_bytes
from tests.parallel.test_fsdp_gather import Bytes, parallelism
from tests.support.layer_checks import in_two_processes


def check(reshards, stages, mesh):
    layout = parallelism(fsdp_reshard_after_forward=reshards, pipeline_parallel_degree=stages)
    for index, setting in enumerate(("high_precision", "quantized")):
        model = Transformer(TransformerModelArgs(dim=64, n_layers=2, n_heads=4, vocab_size=64))
        with torch.no_grad():
            model.init_weights()
        mxtrain.convert(model, recipe="mxfp8_2d", mode="reference")
        found = gathered_bytes(model, dict(model.named_parameters()), 2, 2, layout)[index]
        apply_fsdp(model, mesh, torch.bfloat16, torch.float32, stages > 1, False, reshards)
        for module in (*model.layers.values(), model.tok_embeddings, model.norm, model):
            module.set_force_sum_reduction_for_comms(True)
        gather = CodeGather([model], 2, 2) if setting == "quantized" else None
        with Bytes() as counter:
            model(torch.arange(32).unsqueeze(0)).float().square().mean().backward()
        gains = 4 * sum(p.numel() for n, p in model.named_parameters() if "_norm." in n) if gather else 0
        forward, backward, grads = (size * stages for size in found)  # the model here is all stages
        assert counter.given["_allgather"] == (forward + backward) / 2, "each process gives its half"
        assert counter.given["_reduce_scatter"] == grads - gains, "gradients of gains need none"


@pytest.mark.parametrize(("reshards", "stages"), [("default", 1), ("default", 2), ("always", 1), ("never", 1)])
def test_bytes_of_a_step_are_those_of_the_collectives(reshards, stages):
    in_two_processes(partial(check, reshards, stages), "cpu")
