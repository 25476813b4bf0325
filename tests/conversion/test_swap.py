"""Swapped linears compute wherever PyTorch's own modules would read their weights."""

import copy

import pytest
import torch
import torch.nn as nn

from mxtrain import MXLinear, convert

DIM = 64


class BiasFirstLayerNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bias, self.weight, self.eps = nn.Parameter(torch.zeros(DIM)), nn.Parameter(torch.ones(DIM)), 1e-5

    def forward(self, x):
        return nn.functional.layer_norm(x, (DIM,), self.weight, self.bias, self.eps)


def test_the_order_of_parameters_stays():
    """Optimizers number their states by it."""
    model = nn.Sequential(BiasFirstLayerNorm(), nn.Linear(DIM, DIM))
    before = list(model.named_parameters())
    assert convert(model, "fused_norm").fused_norms == ["0"]
    assert all(a is b for a, b in zip(model.parameters(), dict(before).values(), strict=True))


def encoder(**settings):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(DIM, 2, 2 * DIM, dropout=0.0, batch_first=True, **settings)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not settings).eval()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("settings", [{}, {"norm_first": True, "activation": "gelu"}], ids=["post-norm", "pre-norm"])
def test_encoder_layers_in_evaluation_without_gradients_are_quantized(settings):
    """There PyTorch has a fast path, which calls no linear."""
    model = encoder(**settings)
    original = copy.deepcopy(model)
    plan = convert(model, "mx_linear", mode="reference", filter_fqns=[])
    assert plan.linears == [f"layers.{i}.linear{n}" for i in (0, 1) for n in (1, 2)]
    assert plan.skipped["layers.0.self_attn.out_proj"] == "is a NonDynamicallyQuantizableLinear"
    x = torch.randn(2, 8, DIM)
    padding = torch.arange(8).expand(2, 8) >= torch.tensor([[8], [5]])
    for mask in (None, padding):
        with torch.no_grad():
            y, unquantized = model(x, src_key_padding_mask=mask), original(x, src_key_padding_mask=mask)
        tokens = ~padding if mask is not None else slice(None)
        torch.testing.assert_close(y, model(x, src_key_padding_mask=mask))
        assert not torch.allclose(y[tokens], unquantized[tokens], atol=1e-3)


def test_encoder_layers_without_quantized_linears_keep_their_fast_path():
    model = nn.ModuleList([encoder(), nn.Linear(DIM, DIM)])
    convert(model, "mx_linear", mode="reference", filter_fqns=["0"])
    assert type(model[1]) is MXLinear
    assert model[0].use_nested_tensor and model[0].layers[0].activation_relu_or_gelu == 1
