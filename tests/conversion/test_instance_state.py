"""What users put on a module (hooks, parametrizations, forwards, tensors, attributes) survives a conversion."""

import copy
import types

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.utils as utils
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrizations, prune
from torch.nn.utils.parametrize import register_parametrization

from mxtrain import FusedRMSNorm, MXLinear, MXNorm, MXNormLinear, convert
from mxtrain.errors import ConfigError
from mxtrain.nn.normed_input import NormedInput
from tests.support.conversion_models import DIM, TOKENS, Llama, kinds, llama, loss

NORM, FED, GATE, OTHER = "layers.0.ffn_norm", "layers.0.feed_forward.w1", "router.gate", "layers.0.attention.wo"

HOOKS = {
    "forward hook": lambda module, hook: module.register_forward_hook(hook),
    "forward hook, always called": lambda module, hook: module.register_forward_hook(hook, always_call=True),
    "forward hook with kwargs": lambda module, hook: module.register_forward_hook(hook, with_kwargs=True),
    "forward pre hook": lambda module, hook: module.register_forward_pre_hook(hook),
    "forward pre hook with kwargs": lambda module, hook: module.register_forward_pre_hook(hook, with_kwargs=True),
    "backward hook": lambda module, hook: module.register_full_backward_hook(hook),
    "backward pre hook": lambda module, hook: module.register_full_backward_pre_hook(hook),
    "state dict hook": lambda module, hook: module.register_state_dict_post_hook(hook),
    "state dict pre hook": lambda module, hook: module.register_state_dict_pre_hook(hook),
    "load state dict pre hook": lambda module, hook: module.register_load_state_dict_pre_hook(hook),
    "load state dict post hook": lambda module, hook: module.register_load_state_dict_post_hook(hook),
}


# What the advice adds for a hook that would see what passes from an MXNorm to its linears.
NO_TENSOR = ", unless it needs the result of an MXNorm as a tensor or its gradient"


class Router(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(DIM, 4)

    def forward(self, x):
        return self.gate(x)


class Mixture(Llama):
    def __init__(self):
        super().__init__()
        self.router = Router()

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x)) + self.router(x).sum(-1, keepdim=True)


def mixture():
    torch.manual_seed(0)
    return Mixture()


def recorder():
    """A hook that keeps every call, and the list of calls."""
    calls = []

    def hook(*args, **kwargs):
        calls.append(args)

    return hook, calls


@pytest.mark.parametrize("kind", HOOKS)
def test_a_linear_with_a_hook_stays_and_so_does_its_norm(kind):
    model = llama(layers=1)
    hook, calls = recorder()
    HOOKS[kind](model.get_submodule(FED), hook)
    plan = convert(model, mode="reference")
    name = kind.split(",")[0].removesuffix(" with kwargs")
    reason = f"has a {name}, which a swap would lose: register it after conversion"
    if "dict" not in kind:
        reason += NO_TENSOR
    assert plan.skipped[FED] == reason and plan.skipped[NORM] == f"feeds {FED}, {reason}"
    assert type(model.get_submodule(FED)) is nn.Linear and type(model.get_submodule(NORM)) is nn.RMSNorm
    assert type(model.layers[0].feed_forward.w3) is MXLinear and type(model.layers[0].attention_norm) is MXNorm
    assert not calls, "no code of the user runs during a conversion"
    loss(model).backward()
    model.load_state_dict(model.state_dict())
    assert calls


@pytest.mark.parametrize(
    ("converter", "fqn"),
    [("mxnorm", NORM), ("fused_norm", NORM), ("decompose_k_router", GATE), ("mx_linear", OTHER)],
)
def test_every_converter_leaves_a_module_with_hooks(converter, fqn):
    model = mixture()
    model.second = Router()
    hook, calls = recorder()
    module = model.get_submodule(fqn)
    module.register_forward_hook(hook)
    module.register_forward_pre_hook(hook)
    plan = convert(model, converter)
    assert model.get_submodule(fqn) is module and not calls
    assert plan.skipped[fqn] == (
        "has a forward hook and a forward pre hook, which a swap would lose: register it after conversion" + NO_TENSOR
    )
    model(TOKENS)
    assert len(calls) == 2


@pytest.mark.parametrize("fqn", [NORM, FED])
def test_a_hook_after_conversion_gets_no_tensor_from_an_mxnorm(fqn):
    model = llama(layers=1)
    convert(model, mode="reference")
    hook, calls = recorder()
    model.get_submodule(fqn).register_forward_hook(hook)
    loss(model)
    ((_, (given,), result),) = calls
    assert isinstance(result if fqn == NORM else given, NormedInput)


@pytest.mark.parametrize("fqn", [NORM, FED, OTHER])
def test_hooks_and_parametrizations_after_conversion_work(fqn):
    model = llama()
    convert(model, mode="reference")
    hook, calls = recorder()
    model.get_submodule(fqn).register_forward_hook(hook)
    expected = loss(model)
    register_parametrization(model.get_submodule(fqn), "weight", nn.Identity())
    assert torch.equal(loss(model), expected) and len(calls) == 2


def test_hooks_on_weights_go_with_the_weights():
    model = llama()
    hook, calls = recorder()
    for fqn in (NORM, FED):
        model.get_submodule(fqn).weight.register_hook(hook)
    convert(model, mode="reference")
    loss(model).backward()
    assert type(model.get_submodule(FED)) is MXNormLinear and len(calls) == 2


@pytest.mark.parametrize("kind", [name for name in HOOKS if "forward" in name or "backward" in name])
def test_a_hook_on_a_block_uses_the_norms_outputs_that_pass_it(kind):
    """It would get an MXNorm's result in the place of a tensor. Hooks do not run during conversion."""
    model = llama(layers=1)
    hook, calls = recorder()
    HOOKS[kind](model.layers[0].feed_forward, hook)
    plan = convert(model, mode="reference")
    name = kind.split(",")[0].removesuffix(" with kwargs")
    assert plan.skipped[NORM] == f"its output is used by a {name} of layers.0.feed_forward" and not calls
    assert type(model.layers[0].attention_norm) is MXNorm
    loss(model).backward()
    assert calls and all(isinstance(value, torch.Tensor) for value in torch.utils._pytree.tree_leaves(calls[0][1]))


def test_a_hook_on_a_block_uses_the_norms_outputs_that_it_returns():
    model = nn.Sequential(nn.Sequential(nn.RMSNorm(DIM)), nn.Linear(DIM, DIM), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    model[0].register_forward_hook(recorder()[0])
    plan = convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    assert plan.skipped == {"0.0": "its output is used by a forward hook of 0"}


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


@pytest.mark.parametrize(
    ("fqn", "kind", "settings"),
    [
        (BLOCK, FULL, EXACT),
        (BLOCK, PRE, EXACT),
        (BETWEEN, PRE, EXACT),
        (FED, PRE, EXACT),
        (OTHER, FULL, EXACT),
        *[(fqn, FULL, WITH_THE_NORM) for fqn in (BETWEEN, FED, NORM)],
        *[(fqn, FULL, {"converter": "mx_linear"}) for fqn in (BETWEEN, FED, NORM)],
        ("", OF_ALL, {"converter": "mx_linear"}),
        ("", PRE_OF_ALL, EXACT),
    ],
)
@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_a_backward_hook_after_conversion_edits_the_gradients_of_the_plain_model(fqn, kind, settings):
    got, expected = gradients_with_a_hook(fqn, kind, **settings), gradients_with_a_hook(fqn, kind)
    assert got.keys() == expected.keys()
    assert all((got[name] - expected[name]).norm() <= 1e-5 * expected[name].norm() for name in expected)


@pytest.mark.parametrize(
    ("fqn", "kind", "named"),
    [(fqn, FULL, fqn) for fqn in (BETWEEN, FED, NORM)]
    + [(NORM, PRE, NORM), ("", OF_ALL, "all modules, layers.0.attention_norm among them,")],
)
def test_a_backward_hook_that_needs_the_gradient_of_an_mxnorms_result_is_refused(fqn, kind, named):
    with pytest.raises(ConfigError, match=f"^a full backward hook on {named} cannot see .*: hook the block"):
        gradients_with_a_hook(fqn, kind, **EXACT)


def test_a_module_that_returns_an_mxnorms_result_refuses_backward_hooks_and_its_copy_as_well():
    model = nn.Sequential(nn.Sequential(nn.RMSNorm(DIM)), nn.Linear(DIM, DIM))
    convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    for kind in (FULL, PRE):
        with pytest.raises(ConfigError, match="a full backward hook on 0 cannot see"):
            getattr(copy.deepcopy(model)[0], kind)(twice)


OLD_STYLE = ("a forward pre hook", "register it after conversion")
PARAMETRIZED = ("a parametrization of weight", "register it after conversion")
PUT_ON_A_LINEAR = {
    "weight_norm, old style": (utils.weight_norm, *OLD_STYLE),
    "spectral_norm, old style": (utils.spectral_norm, "a forward pre hook and ", "register it after conversion"),
    "pruning": (lambda module: prune.l1_unstructured(module, "weight", 0.5), *OLD_STYLE),
    "weight_norm": (parametrizations.weight_norm, *PARAMETRIZED),
    "spectral_norm": (parametrizations.spectral_norm, *PARAMETRIZED),
    "parametrization": (lambda m: register_parametrization(m, "weight", nn.Identity()), *PARAMETRIZED),
    "forward": (
        lambda module: setattr(module, "forward", lambda x: x * 2),
        "has its own forward",
        "set it after conversion",
    ),
    "bound forward": (
        lambda module: setattr(module, "forward", types.MethodType(lambda self, x: x * 2, module)),
        "has its own forward",
        "set it after conversion",
    ),
    "another method": (
        lambda module: setattr(module, "reset_parameters", lambda: None),
        "has its own reset_parameters",
        "set it after conversion",
    ),
    "parameter": (
        lambda module: module.register_parameter("scale", nn.Parameter(torch.ones(1))),
        "scale",
        "add it after conversion",
    ),
    "buffer": (lambda module: module.register_buffer("count", torch.ones(1)), "count", "add it after conversion"),
    "child": (
        lambda module: module.add_module("lora_a", nn.Linear(DIM, DIM)),
        "lora_a",
        "add it after conversion",
    ),
}


@pytest.mark.parametrize("case", PUT_ON_A_LINEAR)
def test_what_was_put_on_a_linear_stays(case):
    put, what, way_out = PUT_ON_A_LINEAR[case]
    model = llama(layers=1)
    put(model.layers[0].attention.wo)
    before, module = kinds(model), model.layers[0].attention.wo
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    plan = convert(model, mode="reference")
    assert what in plan.skipped[OTHER] and f"which a swap would lose: {way_out}" in plan.skipped[OTHER]
    assert model.layers[0].attention.wo is module and kinds(model)[OTHER] is before[OTHER]
    after = model.state_dict()
    assert list(after) == list(state) and all(torch.equal(after[name], state[name]) for name in state)
    assert len(plan.norms) == 2 and plan.linears[-1] == "layers.0.feed_forward.w2"


class HomeMadeRMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(dim)), 1e-5

    def forward(self, x):
        return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)


@pytest.mark.parametrize("kind", [nn.RMSNorm, HomeMadeRMSNorm, FusedRMSNorm])
@pytest.mark.parametrize(
    ("converter", "case"),
    [("mxnorm", "parametrization"), ("fused_norm", "bound forward"), ("mxnorm", "forward"), ("mxnorm", "pruning")],
)
def test_what_was_put_on_a_norm_stays(case, kind, converter):
    put, what, way_out = PUT_ON_A_LINEAR[case]
    model = llama(layers=1)
    model.layers[0].ffn_norm = norm = kind(DIM)
    put(norm)
    plan = convert(model, converter)
    assert model.layers[0].ffn_norm is norm and what in plan.skipped[NORM] and way_out in plan.skipped[NORM]
    assert type(model.layers[0].attention_norm) is (MXNorm if converter == "mxnorm" else FusedRMSNorm)


def test_a_function_as_the_forward_of_a_block_is_not_run_and_its_norms_stay():
    model = llama()
    calls, block = [], model.layers[0]
    original = block.forward
    block.forward = lambda x: calls.append(1) or original(x)
    plan = convert(model, mode="reference")
    assert not calls and list(plan.norms) == ["layers.1.attention_norm", "layers.1.ffn_norm"]
    assert (
        "layers.0, which fails without data with 32 token ids as example_inputs (RuntimeError: a function was"
        in plan.skipped[NORM]
    )
    model(TOKENS)
    assert calls == [1]


def test_a_bound_method_as_the_forward_of_a_block_is_followed():
    model = llama()
    block = model.layers[0]
    block.forward = types.MethodType(lambda self, x: self.feed_forward(self.ffn_norm(self.attention(x))), block)
    plan = convert(model, mode="reference")
    assert plan.norms[NORM] == [FED, "layers.0.feed_forward.w3"] and "layers.0.attention_norm" in plan.skipped
    loss(model).backward()


@pytest.mark.parametrize("converter", ["mxnorm", "mx_linear", "fused_norm", "decompose_k_router"])
def test_attributes_flags_and_gradients_go_along(converter):
    model = mixture().eval()
    fqn = {"fused_norm": NORM, "decompose_k_router": GATE}.get(converter, FED)
    old = model.get_submodule(fqn)
    old.is_initialized, old.tags = True, ["residual"]
    old.train()
    old.weight.requires_grad_(False)
    old.weight.optimizer_group = 3
    convert(model, converter)
    new = model.get_submodule(fqn)
    assert new is not old and new.is_initialized is True and new.tags is old.tags
    assert new.training and not new.weight.requires_grad and new.weight.optimizer_group == 3
    assert new.weight is old.weight and getattr(new, "bias", None) is getattr(old, "bias", None)


def test_attributes_of_a_norm_of_the_models_own_go_along():
    """Transformers marks modules that it has initialized; other code may read the epsilon."""
    model = llama(layers=1)
    model.layers[0].ffn_norm = old = HomeMadeRMSNorm(DIM)
    old._is_hf_initialized, old.variance_epsilon = True, 1e-5
    convert(model, mode="reference", eps=1e-3)
    new = model.layers[0].ffn_norm
    assert type(new) is MXNorm and new._is_hf_initialized and new.variance_epsilon == 1e-5
    assert new.eps == new.estimate.eps == 1e-3, "names that the new module has keep its values"


def test_a_model_with_frozen_parameters_trains_the_others():
    model = llama()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("ffn_norm" in name or "wq" in name)
    convert(model, mode="reference")
    loss(model).backward()
    has_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert has_gradient == {f"layers.{i}.{n}.weight" for i in (0, 1) for n in ("ffn_norm", "attention.wq")}


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_model_converted_in_inference_mode_can_be_trained(recipe):
    model, expected = llama(layers=1), llama(layers=1)
    with torch.inference_mode():
        convert(model, recipe=recipe, mode="reference", high_precision_share=0.0)
    convert(expected, recipe=recipe, mode="reference", high_precision_share=0.0)
    assert torch.equal(loss(model), loss(expected))
    loss(model).backward()


class Linear(nn.Linear):
    """Called like PyTorch's."""

    def forward(self, x):
        return super().forward(x) * 2


def test_a_subclass_of_the_same_name_stays_under_its_full_name_and_so_does_its_norm():
    model = llama()
    model.layers[0].attention.wo, model.layers[0].feed_forward.w1 = Linear(DIM, DIM), Linear(DIM, 128)
    plan = convert(model, mode="reference")
    assert plan.skipped[OTHER] == plan.skipped[FED] == f"is a {__name__}.Linear" and NORM in plan.skipped


class Int8Weight(nn.Parameter):
    """A parameter class with arithmetic of its own."""


@pytest.mark.parametrize(
    ("weight", "reason"),
    [
        (Int8Weight(torch.ones(DIM, DIM)), "has a weight of class Int8Weight, not a torch.nn.Parameter"),
        (nn.Parameter(torch.ones(DIM, DIM, dtype=torch.int8), False), "has a weight of torch.int8"),
        (nn.Parameter(torch.ones(DIM, DIM).to(torch.float8_e4m3fn), False), "has a weight of torch.float8_e4m3fn"),
        (nn.Parameter(torch.ones(DIM, DIM).to_sparse()), "has a weight of torch.sparse_coo"),
        (nn.Parameter(torch.ones(32, DIM)), "has a weight of shape (32, 64), not (out_features, in_features)"),
    ],
    ids=["class", "int8", "float8", "sparse", "shape"],
)
def test_linears_with_another_kind_of_weight_stay(weight, reason):
    model = llama(layers=1)
    model.layers[0].attention.wo.weight = weight
    plan = convert(model, "mx_linear", mode="reference")
    assert plan.skipped[OTHER] == reason and len(plan.linears) == 6
    assert model.layers[0].attention.wo.weight is weight


def test_a_linear_whose_weight_is_no_parameter_stays():
    model = llama(layers=1)
    wo = model.layers[0].attention.wo
    weight = wo.weight.detach()
    del wo.weight
    wo.weight = weight
    assert convert(model, "mx_linear", mode="reference").skipped[OTHER] == "has no parameter called weight"


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_models_of_fake_tensors_convert(device):
    """TorchTitan estimates memory with them."""
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


def test_numpy_integers_are_numbers_of_features():
    model = llama(layers=1)
    model.layers[0].attention.wo = nn.Linear(np.int64(DIM), np.int64(DIM), bias=False)
    assert OTHER in convert(model, mode="reference").linears
    loss(model).backward()


def test_quantized_tensors_of_torchao_stay():
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    model = llama().to(torch.bfloat16)
    quantize_(model, Int8WeightOnlyConfig(set_inductor_config=False), filter_fn=lambda module, fqn: fqn == OTHER)
    plan = convert(model, mode="reference")
    assert "has a weight of class" in plan.skipped[OTHER] and len(plan.norms) == 4
