"""Models that cannot be converted are refused with a reason, and stay as they are, bit for bit."""

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel

from mxtrain import ConfigError, convert
from tests.support.conversion_models import llama


@pytest.fixture(scope="module", autouse=True)
def mesh():
    """One process, for models that are wrapped or sharded."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def snapshot(model):
    """Every name, object and bit of a model."""
    tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "modules": {name: (id(module), type(module)) for name, module in modules.items()},
        "tensors": {name: (id(tensor), tensor.dtype, tensor.requires_grad) for name, tensor in tensors.items()},
        "values": {name: tensor.detach().clone() for name, tensor in tensors.items()},
        "attributes": {name: sorted(vars(module)) for name, module in modules.items()},
    }


def assert_unchanged(model, before):
    after = snapshot(model)
    values, values_before = after.pop("values"), before.pop("values")
    assert after == before and list(after["modules"]) == list(before["modules"])
    assert values.keys() == values_before.keys()
    assert all(torch.equal(values[name], values_before[name]) for name in values)


def compiled_in_place():
    model = llama()
    model.layers[1].compile()
    return model


def sharded_in_part():
    model = llama()
    fully_shard(model.layers[0], mesh=init_device_mesh("cpu", (1,)))
    return model


def converted(converter, **settings):
    model = llama()
    convert(model, converter, **settings)
    return model


LAYER_0 = {"filter_fqns": ["layers.1", "output"]}
TWICE = "this Llama was converted before .layers.0.attention"

REFUSED = {
    "no module": (lambda: nn.ParameterList().parameters(), {}, "^model is a generator, not a torch.nn.Module$"),
    "DDP": (
        lambda: DistributedDataParallel(llama()),
        {},
        "^the model is a DistributedDataParallel: convert the model f",
    ),
    "FSDP in part": (sharded_in_part, {}, "^layers.0 is a FSDPLayer: convert the model first"),
    "DTensors": (
        lambda: distribute_module(llama(), init_device_mesh("cpu", (1,))),
        {},
        "^tok_embeddings.weight is a DTensor: convert the model first",
    ),
    "compiled": (
        lambda: torch.compile(llama()),
        {},
        "^the model is compiled: convert the model first, then wrap, shard or compile it$",
    ),
    "compiled in place": (compiled_in_place, {}, "^layers.1 is compiled: convert"),
    "mxnorm twice": (lambda: converted("mxnorm"), {}, f"^converter = 'mxnorm': {TWICE}_norm is an MXNorm.; convert a"),
    "mx_linear after mxnorm": (
        lambda: converted("mxnorm", **LAYER_0),
        {"converter": "mx_linear"},
        f"{TWICE}_norm is an",
    ),
    "inputs in no tuple": (
        llama,
        {"example_inputs": torch.zeros(1, 32, dtype=torch.long)},
        r"^example_inputs is a Tensor, not a tuple or a dict; write \(inputs,\)",
    ),
}


def test_refused_models_stay_as_they_are():
    for build, settings, message in REFUSED.values():
        model = build()
        before = snapshot(model) if isinstance(model, nn.Module) else None
        with pytest.raises(ConfigError, match=message):
            convert(model, **{"mode": "reference", **settings})
        if before:
            assert_unchanged(model, before)


def test_a_model_is_wrapped_after_conversion():
    model = converted("mxnorm", mode="reference")
    tokens = torch.arange(64).view(2, 32)
    expected = model(tokens)
    assert torch.equal(DistributedDataParallel(model)(tokens), expected)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    assert torch.equal(model(tokens), expected)
