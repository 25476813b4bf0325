"""Sizes in [model_args] that no model can have are refused in one line."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.titan.job_config import parse_job_config


@pytest.mark.parametrize(
    "model, words, message",
    [
        ("llama3", "--model_args.n_heads=3", "n_heads = 3 does not fit: dim = 256 is no multiple of n_heads"),
        ("llama3", "--model_args.dim=250", "dim = 250 does not fit: dim = 250 is no multiple of n_heads = 16"),
        ("llama3", "--model_args.n_kv_heads=3", "n_kv_heads = 3 does not fit: n_heads = 16 is no multiple of"),
        ("llama3", "--model_args.dim=48", "dim = 48 does not fit: a head has dim / n_heads = 3 features, and"),
        ("llama3", "--model_args.rope_low_freq_factor=5", "rope_low_freq_factor = 5.0 does not fit: rope_lo"),
        ("qwen3", "--model_args.head_dim=63", "head_dim = 63 is odd, and rotation needs an even number"),
        ("qwen3", "--model_args.n_heads=12", "n_heads = 12 does not fit: n_heads = 12 is no multiple of n_kv"),
        ("qwen3", "--model_args.top_k=2", "top_k = 2 has no effect: model.flavor = 'debugmodel' has no expert"),
        ("deepseek_v3", "--model_args.n_layers=1 --model_args.n_dense_layers=2", "n_dense_layers = 2 does not"),
        ("deepseek_v3", "--model_args.qk_rope_head_dim=3", "qk_rope_head_dim = 3 is odd"),
        ("deepseek_v3", "--model_args.top_k=9", "top_k = 9 does not fit: top_k = 9 is more than num_experts = 8"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_one_line(model, words, message):
    with pytest.raises(ConfigError) as error:
        parse_job_config([f"--model.name={model}", "--model.flavor=debugmodel", "--model.converters=", *words.split()])
    assert str(error.value).startswith(f"model_args.{message}") and "\n" not in str(error.value)


def test_a_token_has_enough_experts_in_its_groups():
    """A router would take others, whose scores are -inf, at random."""
    words = ["--model.name=deepseek_v3", "--model.flavor=671B", "--model.converters=", "--model_args.num_experts=16"]
    parse_job_config([*words, "--model_args.top_k=8"])
    with pytest.raises(ConfigError, match="top_k = 9 is more than num_experts = 16 in 4 of the flavor's 8 groups"):
        parse_job_config([*words, "--model_args.top_k=9"])


def test_experts_of_a_flavor_keep_their_own_size():
    config = ["--model.name=qwen3", "--model.flavor=debugmodel_moe_16", "--model_args.hidden_dim=512"]
    with pytest.raises(ConfigError, match="^model_args.hidden_dim = 512 has no effect: all layers of model.flavor = "):
        parse_job_config(config)
