import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.model_settings import PLACES, given_model_args
from mxtrain.settings.read import known_fields, read_settings

NAMES = {name.partition(".")[2] for name in known_fields() if name.startswith("model_args.")}


def test_every_setting_belongs_to_a_model():
    assert {name for places in PLACES.values() for name in places} == NAMES


def test_what_is_given():
    settings = read_settings(["--model_args.dim=512", "--model_args.no-enable_weight_tying"])
    assert given_model_args(settings) == {"dim": 512, "enable_weight_tying": False}


@pytest.mark.parametrize(
    "flags, message",
    [
        (
            "--model.name=llama3 --model_args.head_dim=64",
            "model_args.head_dim = 64 is no setting of model.name = 'llama3', which has: dim, n_layers, n_heads, ",
        ),
        ("--model.name=llama4 --model_args.hidden_dim=64", "model_args.hidden_dim = 64 is no setting of model.name"),
        ("--model.name=deepseek_v3 --model_args.n_kv_heads=2", "model_args.n_kv_heads = 2 is no setting of model.n"),
        ("--model.name=qwen3 --model_args.rope_factor=2", "model_args.rope_factor = 2.0 is no setting of model.name"),
        (
            "--model.name=gpt_oss --model_args.dim=64",
            "model_args.dim = 64 has no effect on model.name = 'gpt_oss': [model_args] is for llama3, llama4, qwen3, ",
        ),
        (
            "--model_args.max_seq_len=1024 --training.seq_len=2048",
            "model_args.max_seq_len = 1024 is less than training.seq_len = 2048: allowed is that or more",
        ),
        ("--model_args.dim=0", "model_args.dim = 0 should be greater than or equal to 1"),
        ("--model_args.dim=1.5", "model_args.dim = '1.5' should be a valid integer"),
        ("--model_args.rope_theta=inf", "model_args.rope_theta = inf should be a finite number"),
        ("--model_args.rope_factor=0", "model_args.rope_factor = 0.0 should be greater than 0"),
        ("--model_args.norm_eps=-1", "model_args.norm_eps = -1.0 should be greater than or equal to 0"),
        ("--model_args.enable_weight_tying=maybe", "model_args.enable_weight_tying = 'maybe' should be a valid bool"),
        ("--model_args.hidden_size=64", "model_args.hidden_size is not a setting; the closest is model_args.hidden_d"),
        ("--model_args.vocab_size=64", "model_args.vocab_size is not a setting; the closest is data.vocab_size"),
    ],
)
def test_wrong_settings_are_one_line(flags, message):
    with pytest.raises(ConfigError) as error:
        read_settings(flags.split())
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def test_the_line_of_a_wrong_setting_is_named(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text('[model]\nname = "llama3"\n[model_args]\ndim = 64\ntop_k = 2\n')
    with pytest.raises(ConfigError, match=r"^model_args.top_k = 2 is no setting of .* line 5\)$"):
        read_settings([f"--job.config_file={file}"])
