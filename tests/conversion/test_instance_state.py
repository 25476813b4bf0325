"""What users put on a module (hooks, parametrizations, forwards, attributes) survives a conversion."""

import pytest
import torch
import torch.nn as nn
import torch.nn.utils as utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrize import register_parametrization

from mxtrain import FusedRMSNorm, MXNormLinear, convert
from mxtrain.nn.normed_input import NormedInput
from tests.support.conversion_models import DIM, TOKENS, Llama, kinds, llama, loss

NORM, FED, OTHER = "layers.0.ffn_norm", "layers.0.feed_forward.w1", "layers.0.attention.wo"


def recorder():
    """A hook that keeps every call, and the list of calls."""
    calls = []

    def hook(*args, **kwargs):
        calls.append(args)

    return hook, calls


class Int8Weight(nn.Parameter):
    """A parameter class with arithmetic of its own."""


class Linear(nn.Linear):
    """Called like PyTorch's."""

    def forward(self, x):
        return super().forward(x) * 2


LOST = ", which a swap would lose: put it there after conversion"
PUTS = [
    (lambda module: module.register_forward_hook(lambda *args: None), f"has a forward hook{LOST}"),
    (lambda module: module.register_full_backward_hook(lambda *args: None), f"has a backward hook{LOST}"),
    (utils.weight_norm, f"has a forward pre hook{LOST}"),
    (lambda module: setattr(module, "forward", lambda x: x), f"has its own forward{LOST}"),
    (lambda module: register_parametrization(module, "weight", nn.Identity()), "is a Parametrized"),
    (lambda module: setattr(module, "weight", Int8Weight(torch.ones(DIM, DIM))), "has a weight of class Int8Weight, "),
    (lambda module: setattr(module, "__class__", Linear), f"is a {__name__}.Linear"),
]


@pytest.mark.filterwarnings("ignore:.*weight_norm. is deprecated")
def test_a_linear_with_something_of_its_own_stays():
    model = llama(layers=len(PUTS))
    for layer, (put, _) in zip(model.layers, PUTS):
        put(layer.attention.wo)
    modules = dict(model.named_modules())
    plan = convert(model, "mx_linear", mode="reference")
    for i, (_, reason) in enumerate(PUTS):
        fqn = f"layers.{i}.attention.wo"
        assert plan.skipped[fqn].startswith(reason) and model.get_submodule(fqn) is modules[fqn]
    assert len(plan.linears) == 6 * len(PUTS)


class HomeMadeRMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), 1e-5

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("converter", ["mxnorm", "fused_norm"])
def test_a_norm_with_something_of_its_own_stays(converter):
    """Hooks do not run during conversion."""
    model, (hook, calls) = llama(layers=3), recorder()
    for layer, kind in zip(model.layers, (nn.RMSNorm, HomeMadeRMSNorm, FusedRMSNorm)):
        layer.ffn_norm = kind(DIM)
        layer.ffn_norm.register_forward_hook(hook)
        layer.feed_forward.register_forward_hook(hook)
    before = kinds(model)
    plan = convert(model, converter, mode="reference") if converter == "mxnorm" else convert(model, converter)
    assert not calls
    for i in range(3):
        norm = f"layers.{i}.ffn_norm"
        assert plan.skipped[norm] == f"has a forward hook{LOST}" and kinds(model)[norm] is before[norm]


def test_hooks_and_parametrizations_after_conversion_work():
    model = llama()
    hook, calls = recorder()
    for fqn in (NORM, FED):
        model.get_submodule(fqn).weight.register_hook(hook)
    convert(model, mode="reference")
    expected = loss(model)
    expected.backward()
    assert len(calls) == 2, "hooks on weights go with the weights"
    calls.clear()
    for fqn in (NORM, FED, OTHER):
        model.get_submodule(fqn).register_forward_hook(hook)
        register_parametrization(model.get_submodule(fqn), "weight", nn.Identity())
    assert torch.equal(loss(model), expected) and len(calls) == 3
    results = [result for _, _, result in calls]
    assert [type(result) for result in results if not isinstance(result, torch.Tensor)] == [NormedInput]


def twice(module, *gradients):
    return tuple(None if gradient is None else 2 * gradient for gradient in gradients[0])


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize(
    ("fqn", "kind"),
    [
        ("layers.0", "register_full_backward_hook"),
        ("layers.0.feed_forward", "register_full_backward_pre_hook"),
        (FED, "register_full_backward_pre_hook"),
    ],
)
def test_a_backward_hook_after_conversion_edits_the_gradients_of_the_plain_model(fqn, kind):
    gradients = []
    for is_converted in (False, True):
        model = llama(layers=1)
        nn.init.uniform_(model.get_submodule(NORM).weight, 0.5, 2)
        if is_converted:
            convert(model, mode="reference", recipe="unquantized", estimator="exact")
        getattr(model.get_submodule(fqn), kind)(twice)
        loss(model).backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
    for expected, got in zip(*gradients, strict=True):
        assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_attributes_flags_and_gradients_go_along():
    for converter, fqn in [("mxnorm", NORM), ("mxnorm", FED), ("mx_linear", OTHER), ("fused_norm", NORM)]:
        model = llama(layers=1).eval()
        old = model.get_submodule(fqn)
        old.is_initialized, old.tags, old.eps = True, ["residual"], 1e-4
        old.train()
        old.weight.requires_grad_(False)
        old.weight.optimizer_group = 3
        convert(model, converter, **({"eps": 1e-3} if converter == "mxnorm" else {}))
        new = model.get_submodule(fqn)
        assert new is not old and new.is_initialized is True and new.tags is old.tags
        assert new.training and not new.weight.requires_grad and new.weight.optimizer_group == 3
        assert new.weight is old.weight and getattr(new, "bias", None) is getattr(old, "bias", None)
        if (converter, fqn) == ("mxnorm", NORM):
            assert new.eps == new.estimate.eps == 1e-3, "names that the new module has keep its values"


def test_a_model_with_frozen_parameters_trains_the_others():
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ffn_norm" in name or "wq" in name)
    convert(model, mode="reference")
    loss(model).backward()
    has_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert has_gradient == {f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("ffn_norm", "attention.wq")}


def test_models_of_fake_tensors_convert():
    """TorchTitan estimates memory with them."""
    for device in ("cpu", "meta"):
        with FakeTensorMode(), torch.device(device):
            assert len(convert(llama(), mode="reference").norms) == 4


class Listing(Llama):
    """Keeps tensors in a list and a dict: a table that its forward reads, and a result with a gradient."""

    def __init__(self):
        super().__init__(layers=1)
        self.tables, self.results = [torch.ones(DIM)], {}

    def forward(self, tokens):
        self.results["last"] = super().forward(tokens) + self.tables[0].sum()
        return self.results["last"]


def test_tensors_in_lists_and_dicts_are_followed_and_stay():
    model = Listing()
    last = model(TOKENS)
    assert len(convert(model, mode="reference").norms) == 2
    assert model.results["last"] is last and model.tables[0].device == TOKENS.device


def test_quantized_tensors_of_torchao_stay():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama().to(torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False), filter_fn=lambda module, fqn: fqn == OTHER)
    plan = convert(model, mode="reference")
    assert "has a weight of class" in plan.skipped[OTHER] and len(plan.norms) == 4
    assert type(model.get_submodule(FED)) is MXNormLinear
