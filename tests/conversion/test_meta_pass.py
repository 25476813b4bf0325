"""What a survey does not run on the meta device: Triton kernels of the model, flex_attention, compiled functions."""

import pytest
import torch
import torch.nn as nn
import triton
import triton.language as tl
from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
from torch.utils._pytree import tree_flatten

import mxtrain
from mxtrain import ConfigError
from mxtrain.conversion.meta_pass import with_empty_flex_attention, without_triton_launches


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
    report = mxtrain.convert(model, mode="reference", example_inputs=(torch.ones(3, 64),))
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
    report = mxtrain.convert(model, example_inputs=(torch.zeros(1, 32, 64),), filter_fqns=[])
    assert type(model.norm1).__name__ == "MXNorm"
    assert type(model.norm2) is nn.RMSNorm  # what the kernel does with its output is unknown
    assert "doubles, which fails on the meta device (RuntimeError: it launches a Triton kernel" in str(report)


def test_launches_are_as_before_afterwards():
    before = type(double).__getitem__
    with without_triton_launches():
        with pytest.raises(RuntimeError, match="no meta version"):
            double[(1,)](torch.zeros(32, device="meta"), n=32)
    assert type(double).__getitem__ is before


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
    plan = mxtrain.convert(model, example_inputs=(x,), filter_fqns=[])
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
    with pytest.raises(ConfigError, match="\n  norm: its output is used by flex_attention\n"):
        mxtrain.convert(model, example_inputs=(x,), filter_fqns=[])


def facts(results):
    """Shapes, dtypes and places in memory of everything that flex_attention returns."""
    leaves, form = tree_flatten(results)
    return form, [leaf if leaf is None else (leaf.shape, leaf.dtype, leaf.stride()) for leaf in leaves]


AUX = [{"return_aux": AuxRequest(lse)} for lse in (False, True)]


@pytest.mark.parametrize("wanted", [{}, {"return_lse": True}, *AUX], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_empty_attention_is_laid_out_as_what_flex_attention_returns(wanted, transposed):
    """With fewer heads of keys and values than of queries, and shorter values."""
    shapes = (2, 4, 16, 8), (2, 2, 32, 8), (2, 2, 32, 4)
    qkv = [torch.zeros(b, t, h, d).transpose(1, 2) if transposed else torch.zeros(b, h, t, d) for b, h, t, d in shapes]
    expected = facts(flex_attention(*qkv, enable_gqa=True, **wanted))
    with with_empty_flex_attention():
        assert facts(flex_attention(*qkv, enable_gqa=True, **wanted)) == expected
    assert facts(flex_attention(*qkv, enable_gqa=True, **wanted)) == expected


def test_empty_attention_has_the_largest_scores_that_were_asked_for():
    """PyTorch refuses them on a CPU."""
    with with_empty_flex_attention():
        _, aux = flex_attention(*[torch.zeros(2, 4, 16, 8)] * 3, return_aux=AuxRequest(max_scores=True))
    assert aux.lse is None and aux.max_scores.shape == (2, 4, 16)
