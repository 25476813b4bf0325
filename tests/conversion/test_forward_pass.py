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


class AddsInPlace(UsesNormTwice):
    def forward(self, x):
        x = x * 1
        x += self.linear(self.norm(x))
        return self.other(x)


class LooksAt(UsesNormTwice):
    def __init__(self, look):
        super().__init__()
        self.look = look

    def forward(self, x):
        normed = self.norm(x)
        self.look(normed)
        return self.other(self.linear(normed))


def test_norms_that_cannot_be_proven_are_left_alone():
    cases = [
        (UsesNormTwice(), "feeds something other than a linear: add in UsesNormTwice"),
        (CallsLinearTwice(), "feeds {}.linear, which is called more than once"),
        (TiedWeights(), "feeds {}.linear, which shares its weight with another module"),
        (MultipliesTheWeightItself(), "feeds something other than a linear: linear in MultipliesTheWeightItself"),
        (AddsInPlace(), "reads an input that is written to in place after it"),
        (LooksAt(lambda h: h.dtype), "feeds something other than a linear: dtype in LooksAt"),
        (LooksAt(len), "feeds something other than a linear: len in LooksAt"),
        (nn.Sequential(nn.RMSNorm(DIM), nn.RMSNorm(DIM)), None),
        (nn.RMSNorm(DIM), None),
        (nn.Linear(DIM, DIM), None),
    ]
    model, x = nn.Sequential(*(module for module, _ in cases)), torch.randn(3, DIM)
    plan = convert(model, filter_fqns=[], example_inputs=(x,))
    for i, (_, reason) in enumerate(cases):
        assert reason is None or plan.skipped[f"{i}.norm"] == reason.format(i)
    assert plan.norms == {"8": ["9"]}
    assert plan.skipped["7.0"] == "feeds something other than a linear: rms_norm in RMSNorm"
    with torch.no_grad():  # PyTorch refuses a backward after the write
        model(x)
    other = "norm: it feeds something other than a linear: the caller of the model"
    with pytest.raises(ConfigError, match=f"nothing to convert.*\n  {other}"):
        convert(ReturnsNorm(), filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))


class TakesKeywordsOnly(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.linear = nn.RMSNorm(DIM), nn.Linear(DIM, DIM)

    def forward(self, *, pixels, scale):
        return self.linear(self.norm(pixels)) * scale["factor"]


def test_arguments_by_name():
    model, x = TakesKeywordsOnly(), torch.randn(3, DIM)
    inputs = UserDict({"pixels": x, "scale": {"factor": torch.ones(3, 1)}})  # as a tokenizer returns it
    assert convert(model, filter_fqns=[], example_inputs=inputs).norms == {"norm": ["linear"]}
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
    assert convert(LooksAtMask(), "mx_linear", filter_fqns=[], example_inputs=inputs).linears == ["linear"]


def test_a_norm_whose_output_is_only_looked_at_is_swapped():
    def look(h):
        assert h.size(0) and all(
            getattr(h, name)() if callable(getattr(h, name)) else getattr(h, name) for name in LOOKS
        )

    model, x = LooksAt(look), torch.randn(3, DIM)
    assert convert(model, filter_fqns=[], example_inputs=(x,)).norms == {"norm": ["linear"]}
    model(x).sum().backward()


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


def test_converters_that_need_no_forward_pass_convert_without_one():
    for example_inputs in (None, (), (torch.zeros(3, 5),)):
        model = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
        assert convert(model, "mx_linear", filter_fqns=[], example_inputs=example_inputs).linears == ["1"]


@triton.jit
def double(x_ptr, n: tl.constexpr):
    offsets = tl.arange(0, n)
    tl.store(x_ptr + offsets, 2 * tl.load(x_ptr + offsets))


class Launches(UsesNormTwice):
    """Stands for TorchTitan's experts, whose grouped matrix product asks a Triton kernel for the order of tokens."""

    def forward(self, x):
        double[(1,)](x, n=32)
        return self.other(self.linear(self.norm(x)))


class Raises(UsesNormTwice):
    def forward(self, x):
        raise RuntimeError("the cause\n  File a.py")


def test_a_module_that_cannot_run_without_data_is_stepped_over():
    """What it does with the output of a norm before it is unknown."""
    failures = {
        NeedsAValue: r"DataDependentOutputException: .*",
        Launches: "RuntimeError: Cannot access data pointer of Tensor .*",
        Raises: "RuntimeError: the cause",
    }
    for kind, failure in failures.items():
        model = nn.Sequential(nn.RMSNorm(DIM), kind(), nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
        plan = convert(model, filter_fqns=[], example_inputs=(torch.zeros(1, DIM),))
        failed = rf"1, which fails without data \({failure}\)"
        assert re.match(f"feeds something other than a linear: {failed}", plan.skipped["0"])
        assert re.match(f"feeds something other than a linear: {failed}", plan.skipped["1.norm"])
        assert plan.norms == {"2": ["3"]} and type(model[1].norm) is nn.RMSNorm


def test_inputs_of_the_wrong_shape():
    for given, shown in [
        ({"example_inputs": (torch.zeros(1, 4),)}, ""),
        ({}, " with 32 token ids as example_inputs"),
    ]:
        model = nn.Sequential(nn.RMSNorm(DIM), nn.Linear(DIM, DIM))
        with pytest.raises(ConfigError, match=rf"not followed: 0, which fails without data{shown} \("):
            convert(model, filter_fqns=[], **given)


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


FLEX = (  # the compiled one is not run, to spare the test Inductor
    torch.compile(flex_attention),
    flex_attention,
    lambda *qkv, **mask: flex_attention(*qkv, **mask, return_aux=AuxRequest(lse=True))[0],
)


def test_a_norm_before_flex_attention_is_swapped():
    x = torch.randn(2, 32, 64)
    for attend, mask in zip(FLEX, (None, causal_mask(32, "cpu"), None), strict=True):
        model = FlexAttention(attend, mask)
        plan = convert(model, example_inputs=(x,), filter_fqns=[])
        assert plan.norms == {"norm": ["wq", "wk", "wv"]} and plan.linears == ["wo"]
    with torch.no_grad():
        assert model(x).shape == x.shape


class NormOfValues(FlexAttention):
    def forward(self, x):
        h = self.norm(x)
        return self.wq(h) + self.attend(x, x, h)


def test_a_norm_whose_output_flex_attention_reads_is_left_alone():
    model, x = NormOfValues(flex_attention, None), torch.zeros(2, 2, 32, 64)
    with pytest.raises(ConfigError, match="\n  norm: it feeds something other than a linear: flex_attention"):
        convert(model, example_inputs=(x,), filter_fqns=[])
