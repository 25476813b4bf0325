"""Initial weights of TorchTitan 0.2.2's models are the same on every layout."""

from contextlib import contextmanager
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec

from mxtrain.parallel.initial_weights import plain_name
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.engine import build_on_meta
from mxtrain.titan.v02.parallelize import Layout
from tests.support import training_worker
from tests.support.forked import forking_context

# Model -> degrees of the layouts of four processes, and flags. With 515 tokens, shards of an embedding differ in size.
LAYOUTS = {
    "llama3": [
        ({}, ["--model.converters=mxnorm"]),
        ({}, ["--compile.enable", "--activation_checkpoint.mode=full"]),
        ({"dp_replicate": 2}, []),
    ],
    "qwen3": [({}, []), ({"ep": 2}, ["--model.converters=decompose_k_router"])],
    "qwen3 in bf16": [({}, [])],
}


@contextmanager
def built(name: str, rank: int, processes: int, degrees: dict, flags: list[str]):
    """The parameters of a rank's model, built as TorchTitan's trainer does, in a process group that sends nothing."""
    name, _, in_bf16 = name.partition(" in ")
    model = [f"--model.name={name}", "--model.flavor=tiny", "--data.vocab_size=515", "--debug.seed=3"]
    model += ["--training.dtype=bfloat16"] if in_bf16 else []
    job = parse_job_config([*model, "--model.converters=", "--activation_checkpoint.mode=none", *flags])
    usual = dict.fromkeys(["dp_replicate", "cp", "tp", "pp", "ep", "etp"], 1)
    layout = Layout(**{**usual, "dp_shard": -1, **degrees, "world_size": processes})
    torch.manual_seed(processes + rank)  # which must not matter
    model = build_on_meta(job)
    build_model_converters(job, layout).convert(model)
    dist.init_process_group("fake", rank=rank, world_size=processes)
    try:
        with patch("torchtitan.distributed.parallel_dims.device_type", "cpu"):
            layout.build_mesh()
            model = get_train_spec(name).parallelize_fn(model, layout, job)
        model.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
            model.init_weights(buffer_device=None)
        yield {plain_name(name): parameter for name, parameter in model.named_parameters()}
    finally:
        dist.destroy_process_group()


def compare_layouts(results) -> None:
    """Put the parts of rank 3 of 4 that differ from the weights of one process, by model and layout.

    A process may have only one rank: PyTorch keeps the parts of equal meshes.
    """
    training_worker.add_tiny_models()
    differing = {}
    for model, layouts in LAYOUTS.items():
        with built(model, 0, 1, {}, []) as expected:
            assert len(expected) > 15 and all(weight.isfinite().all() for weight in expected.values())
            drawn = [tuple(weight.flatten()[:8].tolist()) for name, weight in expected.items() if "norm" not in name]
            assert len(set(drawn)) == len(drawn)
        for number, (degrees, flags) in enumerate(layouts):
            with built(model, 3, 4, degrees, flags) as found:
                assert found.keys() == expected.keys()
                for name, weight in found.items():
                    layout = weight.device_mesh, weight.placements
                    shape, start = compute_local_shape_and_global_offset(weight.shape, *layout)
                    part = expected[name][tuple(slice(first, first + size) for first, size in zip(start, shape))]
                    if part.shape == weight.shape or not torch.equal(weight.to_local(), part):
                        differing.setdefault(f"{model} {number}", []).append(name)
    results.put(differing)


def test_weights_are_the_same_on_every_layout():
    context = forking_context()
    results = context.Queue()
    process = context.Process(target=compare_layouts, args=(results,))
    process.start()
    assert results.get(timeout=120) == {}
    process.join()
