"""``mx_linear`` beside TorchTitan 0.3's own MXFP8 converter: torchao's layers, emulated."""

import torch
import torch.nn as nn
from torchao.quantization.quantize_.common import KernelPreference
from torchtitan.components.quantization import mx

from mxtrain import MXLinear
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.v03.models import model_spec
from mxtrain.titan.v03.parallelize import with_converters


def results(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and the gradients of all weights."""
    logits = model(tokens)
    logits.square().mean().backward()
    return {"logits": logits.detach(), **{name: weight.grad for name, weight in model.named_parameters()}}


def test_logits_and_gradients_have_the_same_bits(monkeypatch):
    monkeypatch.setattr(mx, "has_cuda_capability", lambda *_: True)  # which the emulation does not need
    job = parse_job_config(["--model.converters=mx_linear", "--model_args.n_layers=1", "--data.vocab_size=64"])
    converter = mx.MXFP8LinearConverter(mx.MXFP8LinearConverter.Config(fqns=["layers"]))
    torch.manual_seed(0)
    theirs = converter.convert(model_spec(job).model).build()
    theirs.init_states()
    ours = with_converters(model_spec(job), job).model.build()
    ours.load_state_dict(theirs.state_dict())
    linears = [module for module in theirs.modules() if isinstance(module, mx.MXFP8Linear)]
    for linear in linears:
        linear.kernel_preference = KernelPreference.EMULATED
    assert len(linears) == sum(isinstance(module, MXLinear) for module in ours.modules()) == 7
    tokens = torch.randint(64, (2, 32))
    expected, found = results(theirs, tokens), results(ours, tokens)
    assert all(torch.equal(found[name], value) for name, value in expected.items())
