"""Gains of 1 + weight, as in Gemma: the sum is fp32, and norms compute what the models' own class computes."""

import hashlib

import pytest
import torch
import torch.nn as nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm

from mxtrain import FusedRMSNorm, MXNorm
from mxtrain.formats.parse import get_recipe
from mxtrain.norms.rms_norm import OffsetRMSNorm
from tests.support.layer_checks import draw

D, EPS = 96, 1e-6

pytestmark = pytest.mark.usefixtures("device")


def offset(norm, weight=None):
    norm.add_unit_offset = True
    if weight is not None:
        norm.weight = weight
    return norm


def of_bits(*bits):
    return torch.tensor(bits, dtype=torch.uint16, device="cpu").view(torch.bfloat16).to(torch.get_default_device())


def test_the_sum_is_fp32():
    gain = offset(OffsetRMSNorm(D)).gain_of(of_bits(0x3B00, 0x3C24, 0x3E9A, 0xBF80))
    assert gain.dtype == torch.float32
    assert gain.view(torch.int32).tolist() == [0x3F804000, 0x3F814800, 0x3FA68000, 0]


def test_a_weight_that_bf16_would_lose_changes_the_codes_of_the_next_weight():
    """A matrix in tiles of 32 x 32, with the hash of its codes as another program computed them."""
    i, j = torch.arange(64)[:, None], torch.arange(96)
    numbers = (37 * i + 101 * j + 7 * i * j) % 251 - 125
    w = numbers * torch.exp2(-6.0 - 3 * (i // 32) - 5 * (j // 32))

    def codes(gain):
        folded = w * gain
        recipe = get_recipe("mxfp8").fprop
        largest = folded.view(2, 32, 3, 32).abs().amax((1, 3)).repeat_interleave(32, 0).repeat_interleave(32, 1)
        scales = recipe.ops.encode(largest, recipe).scales.view(torch.uint8)
        scale = torch.exp2(scales.repeat_interleave(32, 1).float() - 127)
        return (folded / scale).to(torch.float8_e4m3fn).view(torch.uint8).cpu()

    gain = offset(OffsetRMSNorm(D)).gain_of(torch.full((D,), 2.0**-9, dtype=torch.bfloat16))
    found = codes(gain)
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == "0ebb790f978ec3a0"
    assert (found != codes(gain.bfloat16().float())).sum() == 599


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("way", ["fused", "fused compiled", "plain MXNorm"])
def test_a_norm_computes_what_gemmas_computes(way, dtype, compile_backend):
    weight = nn.Parameter(draw(D, seed=1, dtype=dtype))
    x, dy = (draw(4, 8, D, seed=seed, dtype=dtype) for seed in (0, 2))
    norm = offset(MXNorm(D, EPS) if way == "plain MXNorm" else FusedRMSNorm(D, EPS), weight)
    norm.is_plain = True
    own = GemmaRMSNorm(D, EPS)
    own.weight = weight

    def results(norm):
        leaf = x.detach().requires_grad_()
        y = norm(leaf)
        return [y.detach(), *torch.autograd.grad(y, [leaf, weight], dy)]

    got, want = results(torch.compile(norm, backend=compile_backend) if way == "fused compiled" else norm), results(own)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        # Kernels sum in another order, and Triton's interpreter rounds to bf16 toward zero.
        torch.testing.assert_close(a, b, rtol=torch.finfo(a.dtype).eps * 1.01, atol=1e-5)
    # On a GPU, PyTorch's own kernel of RMSNorm sums in another order than a mean.
    assert way != "plain MXNorm" or x.is_cuda or torch.equal(got[0], want[0])


def test_its_weight_starts_at_zero():
    norms = [offset(FusedRMSNorm(D)), offset(MXNorm(D))]
    for norm in norms:
        norm.reset_parameters()
        assert norm.weight.eq(0).all() and "add_unit_offset=True" in repr(norm)
    assert FusedRMSNorm(D).weight.eq(1).all() and "offset" not in repr(FusedRMSNorm(D))
