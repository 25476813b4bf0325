import torch

from mxtrain.diagnostics.sample import sampled_tokens

CPU = torch.device("cpu")


def test_groups_of_32_spread_over_the_tokens():
    index = sampled_tokens(32 * 10 + 5, 32 * 5, CPU)
    assert index.view(-1, 32)[:, 0].tolist() == [0, 64, 128, 192, 256]
    assert index.view(-1, 32).diff(dim=1).eq(1).all()


def test_all_tokens_if_there_are_fewer_than_wanted():
    assert sampled_tokens(100, 512, CPU).tolist() == list(range(96))


def test_no_sample_of_fewer_tokens_than_a_group():
    assert sampled_tokens(31, 512, CPU).tolist() == []
