"""What a forward pass without data shows of the uses of norms, and which layers it makes stay."""

import copy
import re
from collections import UserDict

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

from mxtrain import ConfigError, convert
from mxtrain.nn.normed_input import LOOKS
from tests.support.conversion_models import DIM


class UsesNormTwice(nn.Module):
    """The norm's output is also added to the residual stream, so it must stay a tensor."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.other = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        normed = self.norm(x)
        return self.other(self.linear(normed) + normed)


class ReturnsNorm(UsesNormTwice):
    def forward(self, x):
        normed = self.norm(x)
        return self.other(self.linear(normed)), normed


class CallsLinearTwice(UsesNormTwice):
    def forward(self, x):
        return self.other(self.linear(self.norm(x)) + self.linear(x))


class MultipliesTheWeightItself(UsesNormTwice):
    def forward(self, x):
        return self.other(F.linear(self.norm(x), self.linear.weight))


class NeedsAValue(UsesNormTwice):
    """Half-way it needs a value, which fake tensors do not have; what follows cannot be seen."""

    def forward(self, x):
        y = self.linear(self.norm(x))
        return self.other(y) if y.sum().item() > 0 else y


class TiedWeights(UsesNormTwice):
    def __init__(self):
        super().__init__()
        self.other.weight = self.linear.weight

    def forward(self, x):
        return self.other(self.linear(self.norm(x)))


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (UsesNormTwice, "its output is used by add in UsesNormTwice"),
        (ReturnsNorm, "its output is used by the caller of the model"),
        (CallsLinearTwice, "which is called more than once"),
        (TiedWeights, "its output is used by linear in 0.linear"),
        (MultipliesTheWeightItself, "its output is used by linear in MultipliesTheWeightItself"),
    ],
)
def test_norms_that_cannot_be_proven_are_left_alone(module, reason):
    inner = nn.Sequential(module(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM)) if module is not ReturnsNorm else module()
    fqn = "norm" if module is ReturnsNorm else "0.norm"
    if module is ReturnsNorm:
        with pytest.raises(ConfigError, match=f"nothing to convert.*\n  norm: {reason}"):
            convert(inner, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
        return
    report = convert(inner, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    assert reason in report.skipped[fqn]
    assert report.norms == {"1": ["2"]}
    inner(torch.randn(3, DIM)).sum().backward()


class LooksAtNorm(UsesNormTwice):
    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        normed = self.norm(x)
        self.look(normed)
        return self.other(self.linear(normed))


class TakesKeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, *, pixels, scale):
        return self.linear(self.norm(pixels)) * scale["factor"]


@pytest.mark.parametrize("mapping", [dict, UserDict], ids=["dict", "as a tokenizer returns it"])
def test_arguments_by_name(mapping):
    model, x = TakesKeywordsOnly(), torch.randn(3, DIM)
    inputs = {"pixels": x, "scale": {"factor": torch.ones(3, 1)}}
    assert convert(model, filter_fqns=[], example_inputs=mapping(inputs)).norms == {"norm": ["linear"]}
    model(**inputs).sum().backward()


class LooksAtMask(TakesKeywordsOnly):
    def forward(self, *, pixels, mask):
        x = pixels if mask.all() else pixels * mask
        return self.linear(self.norm(x))


def test_a_mask_whose_values_the_model_looks_at_is_named():
    inputs = {"pixels": torch.randn(3, DIM), "mask": torch.ones(3, 1)}
    with pytest.raises(
        ConfigError, match=r"DataDependentOutput.*; leave out masks and other tensors whose values the model"
    ):
        convert(LooksAtMask(), filter_fqns=[], example_inputs=inputs)
    plan = convert(LooksAtMask(), "mx_linear", filter_fqns=[], example_inputs=inputs)
    note = "  not seen: calls with keywords, and uses of weights outside of their layers, because the forward pass w"
    assert plan.linears == ["linear"] and note in str(plan) and "(DataDependentOutputException: " in plan.note
    assert not convert(TakesKeywordsOnly(), "mx_linear", filter_fqns=[]).note


@pytest.mark.parametrize("name", LOOKS)
def test_a_norm_whose_output_is_only_looked_at_is_swapped(name):
    model, x = LooksAtNorm(lambda h: h.size(0) if name == "size" else getattr(h, name)), torch.randn(3, DIM)
    if callable(getattr(x, name)):
        model.look = lambda h: getattr(h, name)()
    assert convert(model, filter_fqns=[], example_inputs=(x,)).norms == {"norm": ["linear"]}
    model(x).sum().backward()


@pytest.mark.parametrize(("look", "user"), [(lambda h: h.dtype, "dtype"), (len, "__len__")])
def test_a_norm_is_left_alone_where_its_replacement_would_answer_otherwise(look, user):
    model = nn.Sequential(LooksAtNorm(look), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    plan = convert(model, filter_fqns=[], example_inputs=(torch.zeros(3, DIM),))
    assert plan.skipped["0.norm"] == f"its output is used by {user} in LooksAtNorm" and plan.norms == {"1": ["2"]}


class MultipliesJoinedWeights(nn.Module):
    """Looks at the dtype and shape of one weight, and multiplies the others without calling their linears."""

    def __init__(self):
        super().__init__()
        self.norm, self.a, self.b, self.c = nn.RMSNorm(DIM), *(nn.Linear(DIM, DIM) for _ in range(3))

    def forward(self, x):
        y = self.a(self.norm(x.to(self.a.weight.dtype) + self.a.weight.shape[0]))
        return F.linear(y, torch.cat([self.b.weight, self.c.weight]))


@pytest.mark.parametrize(("converter", "swapped"), [("mxnorm", ["norm", "a"]), ("mx_linear", ["a"])])
def test_linears_whose_weights_other_code_multiplies_stay(converter, swapped):
    plan = convert(MultipliesJoinedWeights(), converter, filter_fqns=[], example_inputs=(torch.zeros(3, DIM),))
    reason = "its weight is used outside of it, by cat, where nothing would be quantized"
    assert list(plan.swaps) == swapped and plan.skipped == {"b": reason, "c": reason}
    assert plan.quantized_share == 1 / 3


class SharesNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linears = nn.RMSNorm(DIM), nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(2))

    def forward(self, x):
        for linear in self.linears:
            x = x + linear(self.norm(x))
        return x


def test_linears_that_multiply_other_rows_are_no_group():
    model, x = SharesNorm(), torch.randn(3, DIM)
    plain = copy.deepcopy(model)
    report = convert(model, filter_fqns=[], example_inputs=(x,), recipe="unquantized", estimator="exact")
    assert report.norms == {"norm": ["linears.0", "linears.1"]} and not report.groups and model.norm.group is None
    torch.testing.assert_close(model(x), plain(x))


def test_the_reason_names_the_norm_after_a_norm_and_nothing_that_the_survey_does_itself():
    model = nn.Sequential(nn.RMSNorm(DIM), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    assert convert(model, filter_fqns=[], example_inputs=(torch.zeros(3, DIM),)).skipped == {
        "0": "its output is used by rms_norm in RMSNorm"
    }


class AddsInPlace(UsesNormTwice):
    def forward(self, x):
        x = x * 1
        x += self.linear(self.norm(x))
        return self.other(x)


def test_a_norm_whose_input_is_overwritten_is_left_alone():
    """PyTorch would hand an autograd function in a compiled graph the new values, and no error."""
    plain = nn.Sequential(AddsInPlace(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    model, x = copy.deepcopy(plain), torch.randn(3, DIM)
    with torch.inference_mode():
        assert "0.norm" in convert(copy.deepcopy(plain), example_inputs=(x,)).skipped
    report = convert(model, example_inputs=(x,), recipe="unquantized", estimator="exact")
    gradients = []
    for each in (plain, model):
        torch._dynamo.reset()
        torch.compile(each, backend="aot_eager")(x).square().sum().backward()
        gradients.append(each[0].linear.weight.grad)
    assert report.skipped["0.norm"] == "its input is written to in place after it" and report.norms == {"1": ["2"]}
    torch.testing.assert_close(*gradients)


class CallsByKeyword(nn.Module):
    """Each kind of layer is called with the name of its own argument, and once more without."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = nn.RMSNorm(DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.second, self.third, self.experts = nn.RMSNorm(DIM), nn.LayerNorm(DIM), nn.Identity()
        self.fourth, self.gate = nn.LayerNorm(DIM), nn.Linear(DIM, DIM)
        self.fifth, self.c = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, x):
        x = self.third(input=self.second(x=self.b(input=self.a(self.first(x)))))
        return self.c(self.fifth(self.gate(input=self.fourth(x))))


BY_KEYWORD = "is called with the keyword 'input': pass the value without it"


@pytest.mark.parametrize(
    ("converter", "stay", "swapped"),
    [
        ("mxnorm", {"b": BY_KEYWORD}, ["first", "a", "fifth", "c"]),
        ("mx_linear", {"b": BY_KEYWORD}, ["a", "c"]),
        ("fused_norm", {"third": BY_KEYWORD}, ["first", "second", "fourth", "fifth"]),
    ],
)
def test_layers_that_are_called_by_keyword_stay(converter, stay, swapped):
    """Ours call their argument x, as nn.RMSNorm does."""
    model, x = CallsByKeyword(), torch.randn(3, DIM)
    plan = convert(model, converter, filter_fqns=[], example_inputs=(x,))
    assert list(plan.swaps) == swapped and stay.items() <= plan.skipped.items()
    model(x)


class NormOfHeads(nn.Module):
    """Calls its second norm by keyword, after a linear whose output has another shape than its input."""

    def __init__(self):
        super().__init__()
        self.norm, self.wk, self.k_norm = nn.RMSNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.RMSNorm(DIM)

    def forward(self, x):
        return self.k_norm(input=self.wk(self.norm(x)).unflatten(-1, (2, DIM)))


@pytest.mark.parametrize(("first", "swapped"), [("mxnorm", []), ("mx_linear", ["norm"])])
def test_a_norm_that_is_called_by_keyword_stays_after_an_earlier_conversion(first, swapped):
    model, x = NormOfHeads(), torch.randn(3, DIM)
    convert(model, first, filter_fqns=[], example_inputs=(x,))
    kinds = {name: type(module) for name, module in model.named_modules()}
    plan = convert(model, "fused_norm", example_inputs=(x,))
    assert list(plan.swaps) == swapped and plan.skipped == {"k_norm": BY_KEYWORD}
    assert all(type(model.get_submodule(name)) is kind for name, kind in kinds.items() if name not in swapped)


@pytest.mark.parametrize("example_inputs", [None, (), (torch.zeros(3, 5),)], ids=["none", "too few", "another shape"])
def test_converters_that_need_no_forward_pass_convert_without_one(example_inputs):
    model = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    assert convert(model, "mx_linear", filter_fqns=[], example_inputs=example_inputs).linears == ["1"]


class FailsToCompile(UsesNormTwice):
    def forward(self, x):
        self.linear(self.norm(x))
        raise RuntimeError("backend='inductor' raised:\n\nTypeError: the cause\n  File a.py")


@pytest.mark.parametrize(
    ("module", "message"),
    [(FailsToCompile, "RuntimeError: backend='inductor' raised: TypeError: the cause"), (NeedsAValue, ".*")],
)
def test_the_reason_for_a_module_that_fails_names_the_cause_and_nothing_that_the_survey_does_itself(module, message):
    model = nn.Sequential(nn.RMSNorm(DIM), module(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    reason = convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),)).skipped["0"]
    failure = rf"1, which fails without data \({message}\)"
    assert re.fullmatch(f"its output is used by {failure}, rms_norm in RMSNorm", reason)


def test_a_module_that_cannot_run_without_data_is_stepped_over():
    model = nn.Sequential(NeedsAValue(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    report = convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
    assert "0, which fails without data" in report.skipped["0.norm"]
    assert report.norms == {"1": ["2"]}
    assert type(model[0].norm) is nn.RMSNorm


@pytest.mark.parametrize(
    ("given", "shown"), [({"example_inputs": (torch.zeros(1, 4),)}, ""), ({}, " with 32 token ids as example_inputs")]
)
def test_inputs_of_the_wrong_shape(given, shown):
    model = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
    with pytest.raises(ConfigError, match=rf"not followed: 0, which fails without data{shown} \("):
        convert(model, filter_fqns=[], **given)


@triton.jit
def double(x_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets))


class Doubles(nn.Module):
    """Stands for TorchTitan's experts, whose grouped matrix product asks a Triton kernel for the order of tokens."""

    def forward(self, x):
        double[(1,)](x, n=32)
        return x


class Rotates(nn.Module):
    """As the rotary embeddings of transformers 4: it needs two results of its own, computed without autocast."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.angles = nn.RMSNorm(64), nn.Linear(64, 64), Angles()

    def forward(self, x):
        cos, sin = self.angles(x)
        return self.linear(self.norm(x)) * cos + sin


class Angles(nn.Module):
    def forward(self, x):
        assert not torch.is_autocast_enabled(x.device.type) or x.is_cpu
        with torch.autocast(device_type=x.device.type, enabled=False):
            return x.cos(), x.sin()


def test_autocast_is_followed():
    model = Rotates()
    report = convert(model, mode="reference", example_inputs=(torch.ones(3, 64),))
    assert report.norms == {"norm": ["linear"]}
    with pytest.raises(RuntimeError):  # as before
        torch.autocast("meta")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(torch.ones(3, 64)).dtype == torch.float32 and torch.is_autocast_enabled("cpu")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.RMSNorm(64)
        self.linear = nn.Linear(64, 64)
        self.norm2 = nn.RMSNorm(64)
        self.doubles = Doubles()

    def forward(self, x):
        return self.doubles(self.norm2(self.linear(self.norm1(x))))


def test_the_module_that_launches_is_not_followed():
    model = Model()
    report = convert(model, example_inputs=(torch.zeros(1, 32, 64),), filter_fqns=[])
    assert type(model.norm1).__name__ == "MXNorm"
    assert type(model.norm2) is nn.RMSNorm  # what the kernel does with its output is unknown
    assert "doubles, which fails without data (RuntimeError: it launches a Triton kernel" in str(report)


compiled_flex_attention = torch.compile(flex_attention)


def causal_mask(tokens: int, device: str):
    return create_block_mask(lambda batch, head, q, k: q >= k, None, None, tokens, tokens, device=device)


class FlexAttention(nn.Module):
    """Written by hand. Values are shorter than queries, and the result is viewed as it lies in memory."""

    def __init__(self, attend, mask):
        super().__init__()
        self.norm, self.attend, self.mask = nn.RMSNorm(64), attend, mask
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(i, o) for i, o in ((64, 64), (64, 64), (64, 32), (32, 64)))

    def forward(self, x):
        x = self.norm(x)
        batch, tokens, _ = x.shape
        q, k, v = (w(x).view(batch, tokens, 2, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = self.attend(q, k, v, block_mask=self.mask or causal_mask(tokens, x.device))
        return self.wo(y.transpose(1, 2).view(batch, tokens, -1))


FLEX = {
    "plain": flex_attention,
    "compiled": compiled_flex_attention,
    "with lse": lambda *qkv, **mask: flex_attention(*qkv, **mask, return_lse=True)[0],
    "with aux": lambda *qkv, **mask: flex_attention(*qkv, **mask, return_aux=AuxRequest(lse=True))[0],
}


@pytest.mark.parametrize("mask", [None, causal_mask(32, "cpu")], ids=["mask in the forward", "mask of the model"])
@pytest.mark.parametrize("attend", FLEX.values(), ids=FLEX)
def test_a_norm_before_flex_attention_is_swapped(attend, mask):
    model, x = FlexAttention(attend, mask), torch.randn(2, 32, 64)
    plan = convert(model, example_inputs=(x,), filter_fqns=[])
    assert plan.norms == {"norm": ["wq", "wk", "wv"]} and plan.linears == ["wo"]
    if attend is not compiled_flex_attention:  # spares the test Inductor
        with torch.no_grad():
            assert model(x).shape == x.shape


class NormOfValues(FlexAttention):
    def forward(self, x):
        h = self.norm(x)
        return self.wq(h) + self.attend(x, x, h)


def test_a_norm_whose_output_flex_attention_reads_is_left_alone():
    model, x = NormOfValues(flex_attention, None), torch.zeros(2, 2, 32, 64)
    with pytest.raises(ConfigError, match="\n  norm: its output is used by flex_attention"):
        convert(model, example_inputs=(x,), filter_fqns=[])
