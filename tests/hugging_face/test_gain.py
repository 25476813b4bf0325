import pytest
import torch
import torch.nn.functional as F

from mxtrain.hugging_face.gain import fold, folded_norm, norm_before


def test_a_folded_weight_after_ones_gives_the_same_result():
    torch.manual_seed(0)
    x, gain, weight = torch.randn(5, 8), torch.rand(8) + 0.5, torch.randn(6, 8)
    plain = F.rms_norm(x, (8,), gain, 1e-5) @ weight.t()
    folded = F.rms_norm(x, (8,), torch.ones(8), 1e-5) @ fold(weight, gain).t()
    torch.testing.assert_close(folded, plain)
    assert not torch.allclose(F.rms_norm(x, (8,), torch.ones(8), 1e-5) @ weight.t(), plain)


def test_folding_computes_in_fp32_and_takes_stacked_experts():
    weight, gain = torch.full((2, 1, 2), 1.0078125, dtype=torch.bfloat16), torch.tensor([1.0078125, 2.0]).bfloat16()
    folded = fold(weight, gain)
    assert folded.dtype == torch.float32 and folded.shape == (2, 1, 2)
    assert folded[1, 0].tolist() == [1.0078125**2, 2.015625], "bf16 would round the first one"


def test_folding_commutes_with_an_order_of_rows():
    weight, gain, order = torch.randn(6, 4), torch.rand(4), torch.randperm(6)
    assert torch.equal(fold(weight, gain)[order], fold(weight[order], gain))


@pytest.mark.parametrize(
    "parameter, norm",
    {
        "layers.3.attention.wq.weight": "layers.3.attention_norm",
        "layers.3.attention.wk.weight": "layers.3.attention_norm",
        "layers.3.attention.wv.weight": "layers.3.attention_norm",
        "layers.12.feed_forward.w1.weight": "layers.12.ffn_norm",
        "layers.12.feed_forward.w3.weight": "layers.12.ffn_norm",
        "layers.0.moe.experts.w1": "layers.0.ffn_norm",
        "layers.0.moe.experts.w3": "layers.0.ffn_norm",
        "layers.0.moe.router.gate.weight": "layers.0.ffn_norm",
        "layers.3.attention.wo.weight": None,
        "layers.3.feed_forward.w2.weight": None,
        "layers.0.moe.experts.w2": None,
        "layers.3.attention.q_norm.weight": None,
        "output.weight": None,
        "tok_embeddings.weight": None,
    }.items(),
)
def test_which_norm_feeds_a_parameter(parameter, norm):
    assert norm_before(parameter) == norm


@pytest.mark.parametrize(
    "parameter, norm",
    {
        "layers.3.attention_norm.weight": "layers.3.attention_norm",
        "layers.3.ffn_norm.weight": "layers.3.ffn_norm",
        "layers.3.attention.q_norm.weight": None,
        "norm.weight": None,
        "layers.3.attention.wq.weight": None,
    }.items(),
)
def test_which_gains_become_ones(parameter, norm):
    assert folded_norm(parameter) == norm
