"""The trainer's converters tell linears by which norm they are fed, so that weights can be cast ahead with its gain."""

import copy

import pytest
import torch

from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.titan.models.describe import build_on_meta, convert_on_meta
from mxtrain.titan.parse import parse_job_config


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear"])
def test_all_linears_of_a_converted_model_are_cast_ahead(converter):
    flags = ["--model.name=llama3", "--model.flavor=debugmodel", f"--model.converters={converter}"]
    job_config = parse_job_config(flags)
    assert job_config.mxnorm.cache_weights
    model = build_on_meta(job_config)
    convert_on_meta(job_config, model)
    # As a pipeline copies it for its stages.
    model = copy.deepcopy(model).to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights()
    ReadyWeights([model]).refresh()
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(linears) == 7 * len(model.layers)
    assert all(linear.ready is not None for linear in linears.values())
    layer = next(iter(model.layers.values()))
    norm = layer.attention_norm
    assert layer.attention.wq.fed_by == ((norm,) if converter == "mxnorm" else ())
