"""What users put on a module (hooks, parametrizations, forwards, tensors, attributes) survives a conversion."""

import types

import pytest
import torch
import torch.nn as nn
import torch.nn.utils as utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils.parametrize import register_parametrization

from mxtrain import FusedRMSNorm, MXLinear, MXNorm, MXNormLinear, convert
from mxtrain.nn.normed_input import NormedInput
from tests.support.conversion_models import DIM, TOKENS, Llama, kinds, llama, loss

NORM, FED, OTHER = "layers.0.ffn_norm", "layers.0.feed_forward.w1", "layers.0.attention.wo"

HOOKS = {
    "forward hook": lambda module, hook: module.register_forward_hook(hook, always_call=True),
    "forward pre hook": lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    "backward hook": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre hook": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "state dict hook": lambda module, hook: module.register_state_dict_post_hook(hook),
    "load state dict pre hook": lambda module, hook: module.register_load_state_dict_pre_hook(hook),
}
# What the advice adds for a hook that would see what passes from an MXNorm to its linears.
NO_TENSOR = ", unless it needs the result of an MXNorm as a tensor or its gradient"


def recorder():
    """A hook that keeps every call, and the list of calls."""
    calls = []

    def hook(*args, **kwargs):
        calls.append(args)

    return hook, calls


def test_modules_with_hooks_stay_and_their_hooks_run():
    model = llama(layers=len(HOOKS))
    hook, calls = recorder()
    for layer, put in zip(model.layers, HOOKS.values()):
        put(layer.feed_forward.w1, hook)
        put(layer.attention_norm, hook)
    before = kinds(model)
    plan = convert(model, mode="reference", filter_fqns=[])
    for i, kind in enumerate(HOOKS):
        reason = f"has a {kind}, which a swap would lose: register it after conversion"
        reason += "" if "dict" in kind else NO_TENSOR
        w1, norm = f"layers.{i}.feed_forward.w1", f"layers.{i}.attention_norm"
        assert plan.skipped[w1] == plan.skipped[norm] == reason
        assert plan.skipped[f"layers.{i}.ffn_norm"] == f"feeds {w1}, {reason}"
        assert kinds(model)[w1] is before[w1] and type(model.layers[i].feed_forward.w3) is MXLinear
    assert not calls, "no code of the user runs during a conversion"
    loss(model).backward()
    model.load_state_dict(model.state_dict())
    assert len(calls) >= 2 * len(HOOKS)


def test_a_hook_on_a_block_uses_the_norms_outputs_that_pass_it():
    """It would get an MXNorm's result in the place of a tensor. Hooks do not run during conversion."""
    seen = {kind: put for kind, put in HOOKS.items() if "dict" not in kind}
    model = llama(layers=len(seen))
    hook, calls = recorder()
    for layer, put in zip(model.layers, seen.values()):
        put(layer.feed_forward, hook)
    plan = convert(model, mode="reference")
    assert not calls and all(type(layer.attention_norm) is MXNorm for layer in model.layers)
    for i, kind in enumerate(seen):
        assert plan.skipped[f"layers.{i}.ffn_norm"] == f"its output is used by a {kind} of layers.{i}.feed_forward"
    model = nn.Sequential(nn.Sequential(nn.RMSNorm(DIM)), nn.Linear(DIM, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    model[0].register_forward_hook(hook)
    plan = convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    assert plan.skipped == {"0.0": "its output is used by a forward hook of 0"}, "which the block returns"


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


def gradients_with_a_hook(fqn, kind, **settings):
    """Of a model whose hook doubles a gradient; converted with ``settings``."""
    model = llama(layers=1)
    nn.init.uniform_(model.get_submodule(NORM).weight, 0.5, 2)
    if settings:
        convert(model, mode="reference", recipe="unquantized", **settings)
    with getattr(model.get_submodule(fqn) if fqn else nn.modules.module, kind)(twice):
        loss(model).backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


EXACT = dict(estimator="exact", filter_fqns=["output"])
WITH_THE_NORM = dict(estimator="exact", filter_fqns=["output", NORM])
BLOCK, BETWEEN = "layers.0", "layers.0.feed_forward"
FULL, PRE = "register_full_backward_hook", "register_full_backward_pre_hook"
OF_ALL, PRE_OF_ALL = "register_module_full_backward_hook", "register_module_full_backward_pre_hook"


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_backward_hook_after_conversion_edits_the_gradients_of_the_plain_model():
    for fqn, kind, settings in [
        (BLOCK, FULL, EXACT),
        (BLOCK, PRE, EXACT),
        (BETWEEN, PRE, EXACT),
        (FED, PRE, EXACT),
        (OTHER, FULL, EXACT),
        *[(fqn, FULL, WITH_THE_NORM) for fqn in (BETWEEN, FED, NORM)],
        ("", OF_ALL, {"converter": "mx_linear"}),
        ("", PRE_OF_ALL, EXACT),
    ]:
        got, expected = gradients_with_a_hook(fqn, kind, **settings), gradients_with_a_hook(fqn, kind)
        assert got.keys() == expected.keys()
        for name in expected:
            assert (got[name] - expected[name]).norm() <= 1e-5 * expected[name].norm(), (fqn, kind, name)


class Int8Weight(nn.Parameter):
    """A parameter class with arithmetic of its own."""


class Linear(nn.Linear):
    """Called like PyTorch's."""

    def forward(self, x):
        return super().forward(x) * 2


def method(module, x):
    return x * 2


HOOK = "register it after conversion" + NO_TENSOR
AFTER = "which a swap would lose: {} after conversion"
PUT_ON_A_LINEAR = [
    (utils.weight_norm, f"has a forward pre hook, which a swap would lose: {HOOK}"),
    (
        lambda module: register_parametrization(module, "weight", nn.Identity()),
        "has a parametrization of weight, " + AFTER.format("register it"),
    ),
    (lambda module: setattr(module, "forward", lambda x: x), "has its own forward, " + AFTER.format("set it")),
    (
        lambda module: setattr(module, "forward", types.MethodType(method, module)),
        "has its own forward, " + AFTER.format("set it"),
    ),
    (
        lambda module: setattr(module, "reset_parameters", lambda: None),
        "has its own reset_parameters, " + AFTER.format("set it"),
    ),
    (
        lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "holds scale, " + AFTER.format("add it"),
    ),
    (lambda module: module.register_buffer("count", torch.ones(1)), "holds count, " + AFTER.format("add it")),
    (lambda module: module.add_module("lora_a", nn.Linear(DIM, 8)), "holds lora_a, " + AFTER.format("add it")),
    (
        lambda module: setattr(module, "weight", Int8Weight(torch.ones(DIM, DIM))),
        "has a weight of class Int8Weight, not a torch.nn.Parameter",
    ),
    (lambda module: delattr(module, "weight"), "has no parameter called weight"),
    (lambda module: setattr(module, "__class__", Linear), f"is a {__name__}.Linear"),
]


def test_what_was_put_on_a_linear_stays():
    model = llama(layers=len(PUT_ON_A_LINEAR))
    for layer, (put, _) in zip(model.layers, PUT_ON_A_LINEAR):
        put(layer.attention.wo)
    modules, state = dict(model.named_modules()), {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = convert(model, "mx_linear", mode="reference")
    for i, (_, reason) in enumerate(PUT_ON_A_LINEAR):
        fqn = f"layers.{i}.attention.wo"
        assert plan.skipped[fqn] == reason and model.get_submodule(fqn) is modules[fqn]
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[name], state[name]) for name in state)
    assert len(plan.linears) == 6 * len(PUT_ON_A_LINEAR)


class HomeMadeRMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), 1e-5

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


def test_what_was_put_on_a_norm_stays():
    puts = PUT_ON_A_LINEAR[1:4:2]
    for converter in ("mxnorm", "fused_norm"):
        for kind in (nn.RMSNorm, nn.LayerNorm, HomeMadeRMSNorm, FusedRMSNorm):
            model = llama(layers=3)
            for layer, (put, _) in zip(model.layers, puts):
                layer.ffn_norm = kind(DIM)
                put(layer.ffn_norm)
            plan = convert(model, converter)
            for i, (_, reason) in enumerate(puts):
                is_seen = converter == "fused_norm" or kind is not nn.LayerNorm
                assert type(model.layers[i].ffn_norm).__bases__[0] is kind or type(model.layers[i].ffn_norm) is kind
                assert not is_seen or plan.skipped[f"layers.{i}.ffn_norm"] == reason


def test_the_forward_of_a_block_is_followed_if_it_is_a_bound_method():
    """A function may refer to any object, the original model among them, and is not run."""
    model, calls = llama(), []
    first, second = model.layers
    original = first.forward
    first.forward = lambda x: calls.append(1) or original(x)
    second.forward = types.MethodType(lambda self, x: self.feed_forward(self.ffn_norm(self.attention(x))), second)
    plan = convert(model, mode="reference")
    assert not calls and plan.norms == {"layers.1.ffn_norm": [f"layers.1.feed_forward.w{i}" for i in (1, 3)]}
    why = "layers.0, which fails without data with 32 token ids as example_inputs (RuntimeError: a function was set"
    assert why in plan.skipped[NORM] and "layers.1.attention_norm" in plan.skipped
    loss(model).backward()
    assert calls == [1]


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


def test_a_model_converted_in_inference_mode_can_be_trained():
    model, expected = llama(layers=1), llama(layers=1)
    with torch.inference_mode():
        convert(model, recipe="nvfp4", mode="reference", high_precision_share=0.0)
    convert(expected, recipe="nvfp4", mode="reference", high_precision_share=0.0)
    assert torch.equal(loss(model), loss(expected))
    loss(model).backward()


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
