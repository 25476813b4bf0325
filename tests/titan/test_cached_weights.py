"""The trainer's converters tell every linear which norm feeds it, so its weight can be cast ahead with the gain."""

import copy

import pytest
import torch

from mxtrain import MXNorm
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.releases import engine


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_all_linears_of_a_converted_model_are_cast_ahead(converter):
    flags = ["--model.name=llama3", "--model.flavor=debugmodel", f"--model.converters={converter}"]
    job_config = parse_job_config(flags)
    assert job_config.mxnorm.cache_weights
    model = engine().build_on_meta(job_config)
    convert_on_meta(job_config, model)
    # As a pipeline copies it for its stages.
    model = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    ReadyWeights([model]).refresh()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == 7 * len(model.layers)
    joined = {linear for norm in model.modules() if isinstance(norm, MXNorm) for linear in norm.group.linears}
    assert len(joined) == (5 * len(model.layers) if converter == "mxnorm" else 0)
    assert all((linear.ready is None) == (linear in joined) for linear in linears.values())
    layer = model.layers["0"]
    norm, wq = layer.attention_norm, getattr(layer.attention, "qkv_linear", layer.attention).wq
    if converter == "mxnorm":
        assert norm.group.ready is not None and layer.ffn_norm.group.ready is not None
        assert norm.group.linears[0] is wq
    assert wq.fed_by == ((norm,) if converter == "mxnorm" else ())
