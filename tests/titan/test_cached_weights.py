"""The trainer's converters tell every linear which norm feeds it, so its weight can be cast ahead with the gain."""

import copy

import pytest
import torch

from mxtrain import MXNorm
from mxtrain.nn.ready_weights import ReadyWeights
from mxtrain.nn.three_gemms import QuantizedLinear
from mxtrain.titan.converters import convert_on_meta
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v02.models.on_meta import build_on_meta


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
    layer = next(iter(model.layers.values()))
    joined = {linear for norm in model.modules() if isinstance(norm, MXNorm) for linear in norm.group.linears}
    assert len(joined) == (5 * len(model.layers) if converter == "mxnorm" else 0)
    assert all((linear.ready is None) == (linear in joined) for linear in linears.values())
    if converter == "mxnorm":
        assert layer.attention_norm.group.ready is not None and layer.ffn_norm.group.ready is not None
        assert layer.attention_norm.group.linears[0] is layer.attention.wq
    norm = layer.attention_norm
    assert layer.attention.wq.fed_by == ((norm,) if converter == "mxnorm" else ())
