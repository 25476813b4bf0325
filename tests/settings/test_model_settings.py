"""Sizes in [model_args] that no model can have are refused in one line."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.model_settings import PLACES, given_in
from mxtrain.settings.read import read_settings
from mxtrain.settings.titan import own_fields
from mxtrain.titan.job_config import parse_job_config


def test_every_setting_belongs_to_a_model():
    names = {name.partition(".")[2] for name in own_fields() if name.startswith("model_args.")}
    assert {name for places in PLACES.values() for name in places} == names
    settings = read_settings(["--model_args.dim=512", "--model_args.no-enable_weight_tying"])
    assert given_in(settings.values) == {"dim": 512, "enable_weight_tying": False}


@pytest.mark.parametrize(
    "model, words, message",
    [
        ("llama3 debugmodel", "dim=250", "dim = 250 does not fit: dim = 250 is no multiple of n_heads = 16"),
        ("llama3 debugmodel", "n_kv_heads=3", "n_kv_heads = 3 does not fit: n_heads = 16 is no multiple of"),
        ("llama3 debugmodel", "dim=48", "dim = 48 does not fit: a head has dim / n_heads = 3 features, and"),
        ("llama3 debugmodel", "rope_low_freq_factor=5", "rope_low_freq_factor = 5.0 does not fit: rope_lo"),
        ("qwen3 debugmodel", "head_dim=63", "head_dim = 63 is odd, and rotation needs an even number"),
        ("qwen3 debugmodel", "top_k=2", "top_k = 2 has no effect, because model.flavor = 'debugmodel' has no exp"),
        ("qwen3 debugmodel_moe_16", "hidden_dim=512", "hidden_dim = 512 has no effect: all layers of model.flavor"),
        ("deepseek_v3 debugmodel", "n_layers=1 n_dense_layers=2", "n_dense_layers = 2 does not"),
        ("deepseek_v3 debugmodel", "top_k=9", "top_k = 9 does not fit: top_k = 9 is more than num_experts = 8"),
        # A router would take others, whose scores are -inf, at random.
        ("deepseek_v3 671B", "num_experts=16 top_k=9", "top_k = 9 does not fit: top_k = 9 is more than num_experts = "
         "16 in 4 of the flavor's 8 groups"),
    ],
)  # fmt: skip
def test_sizes_that_do_not_fit_are_one_line(model, words, message):
    name, flavor = model.split()
    flags = [f"--model.name={name}", f"--model.flavor={flavor}", "--model.converters="]
    with pytest.raises(ConfigError) as error:
        parse_job_config([*flags, *(f"--model_args.{word}" for word in words.split())])
    assert str(error.value).startswith(f"model_args.{message}") and "\n" not in str(error.value)
