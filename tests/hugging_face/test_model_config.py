import json
from dataclasses import replace

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mxtrain.errors import ConfigError
from mxtrain.hugging_face.model_config import (
    CONFIG_FILE,
    GENERATION_FILE,
    ModelShape,
    RopeScaling,
    config_json,
    read_generation,
    read_shape,
)

LLAMA = ModelShape(
    model_type="llama",
    hidden_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    intermediate_size=96,
    vocab_size=320,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(8.0, 1.0, 4.0, 8192),
    max_position_embeddings=131072,
)
QWEN = replace(LLAMA, model_type="qwen3", head_dim=32, rope_scaling=None, tie_word_embeddings=True)
EXPERTS = replace(QWEN, model_type="qwen3_moe", num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32)


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config) if isinstance(config, dict) else config)
    return folder


def content(shape=LLAMA):
    return config_json(shape, "float32", {"bos_token_id": 0, "eos_token_id": 1})


@pytest.mark.parametrize("shape", [LLAMA, QWEN, replace(LLAMA, rope_scaling=None)])
def test_a_shape_is_read_as_it_was_written(shape, tmp_path):
    assert read_shape(write(tmp_path, content(shape))) == shape


@pytest.mark.parametrize("shape", [LLAMA, QWEN, EXPERTS])
def test_transformers_takes_every_value(shape, tmp_path):
    config = transformers.AutoConfig.from_pretrained(write(tmp_path, content(shape)))
    for name in ("hidden_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "tie_word_embeddings", "vocab_size"):
        assert getattr(config, name) == getattr(shape, name), name
    assert config.rope_parameters["rope_theta"] == shape.rope_theta
    assert config.rope_parameters["rope_type"] == ("llama3" if shape.rope_scaling else "default")
    assert (config.max_position_embeddings, config.bos_token_id, config.eos_token_id) == (131072, 0, 1)
    if shape.num_experts:
        assert (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size) == (4, 2, 32)


@pytest.mark.parametrize("shape", [LLAMA, QWEN])
def test_reads_what_transformers_writes(shape, tmp_path):
    transformers.AutoConfig.from_pretrained(write(tmp_path / "a", content(shape))).save_pretrained(tmp_path / "b")
    assert "rope_parameters" in json.loads((tmp_path / "b" / CONFIG_FILE).read_text()), "the names of transformers 5"
    assert read_shape(tmp_path / "b") == shape


def test_missing_values_have_the_defaults_of_transformers(tmp_path):
    names = ("num_key_value_heads", "head_dim", "rms_norm_eps", "rope_scaling", "rope_theta", "max_position_embeddings")
    shape = read_shape(write(tmp_path, {name: value for name, value in content().items() if name not in names}))
    assert (shape.num_key_value_heads, shape.head_dim, shape.rms_norm_eps) == (4, 16, 1e-6)
    assert (shape.rope_theta, shape.rope_scaling, shape.max_position_embeddings) == (10000.0, None, None)
    assert read_shape(write(tmp_path, content(QWEN) | {"head_dim": None})) == replace(QWEN, head_dim=128)


def test_a_scaling_by_one_is_none(tmp_path):
    config = content(replace(LLAMA, rope_scaling=replace(LLAMA.rope_scaling, factor=1.0)))
    assert read_shape(write(tmp_path, config)) == replace(LLAMA, rope_scaling=None)


def test_differences_are_named_in_order():
    other = replace(LLAMA, hidden_size=1, vocab_size=2, rope_theta=3.0)
    assert LLAMA.differences(other) == ["hidden_size", "vocab_size", "rope_theta"]
    assert LLAMA.differences(other, but=("hidden_size", "rope_theta")) == ["vocab_size"]


def test_generation_settings_are_read_as_transformers_does(tmp_path):
    write(tmp_path, {**content(), "eos_token_id": [7, 8], "pad_token_id": None})
    assert read_generation(tmp_path) == {"bos_token_id": 0, "eos_token_id": [7, 8]}
    (tmp_path / GENERATION_FILE).write_text('{"eos_token_id": [5, 6], "top_p": 0.9}')
    assert read_generation(tmp_path) == {"bos_token_id": 0, "eos_token_id": [5, 6], "top_p": 0.9}
    (tmp_path / GENERATION_FILE).write_text("[")
    with pytest.raises(ConfigError, match="generation_config.json is not valid JSON: "):
        read_generation(tmp_path)


def rotary(folder):
    """Return the parameters of the rotary frequencies that transformers takes, and the frequencies."""
    config = transformers.AutoConfig.from_pretrained(folder)
    frequencies = LlamaRotaryEmbedding(config).inv_freq
    return config.rope_parameters, frequencies


SCALING = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
ORIGINAL = {"original_max_position_embeddings": 512}
DEFAULT = {"rope_type": "default", "rope_theta": 1e4}
ROPES = {
    "transformers 4": {"rope_scaling": SCALING | ORIGINAL, "rope_theta": 5e5},
    "older": {"rope_scaling": {"type": "llama3", **SCALING, **ORIGINAL}, "rope_theta": 5e5},
    "transformers 5": {"rope_parameters": SCALING | ORIGINAL | {"rope_theta": 5e5}},
    "theta outside": {"rope_parameters": SCALING | ORIGINAL, "rope_theta": 5e5},
    "theta twice": {"rope_parameters": DEFAULT, "rope_theta": 5e5},
    "scaling beside parameters": {"rope_parameters": DEFAULT, "rope_scaling": SCALING | ORIGINAL, "rope_theta": 5e5},
    "theta in unread parameters": {"rope_parameters": {"rope_theta": 5e5}, "rope_scaling": SCALING | ORIGINAL},
    "default beside scaled": {"rope_parameters": SCALING | ORIGINAL, "rope_scaling": DEFAULT},
    "empty beside scaled": {"rope_parameters": SCALING | ORIGINAL, "rope_scaling": {}, "rope_theta": 5e5},
    "original outside": {"rope_scaling": SCALING | ORIGINAL, "original_max_position_embeddings": 256},
    "no original": {"rope_scaling": SCALING, "max_position_embeddings": 1024},
    "no positions": {"rope_scaling": SCALING},
    "nothing": {},
}


@pytest.mark.parametrize("case", ROPES)
def test_rotary_parameters_are_those_that_transformers_takes(case, tmp_path):
    config = content()
    for name in ("rope_scaling", "rope_theta", "max_position_embeddings"):
        del config[name]
    shape, (expected, _) = read_shape(write(tmp_path, config | ROPES[case])), rotary(tmp_path)
    assert shape.rope_theta == expected["rope_theta"]
    scaling = None if shape.rope_scaling is None else vars(shape.rope_scaling)
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    assert scaling == (None if expected["rope_type"] == "default" else {name: expected[name] for name in names})


@pytest.mark.parametrize("original, positions", [(8192, 128), (8192, 8192), (1000, 100), (8192, 1)])
def test_a_short_context_has_the_same_frequencies_without_a_warning(original, positions, tmp_path):
    """transformers warns at every load unless original_max_position_embeddings is below the number of positions."""
    shape = replace(LLAMA, head_dim=128, rope_scaling=RopeScaling(8.0, 1.0, 4.0, original))
    _, expected = rotary(write(tmp_path / "long", content(shape)))
    short = write(tmp_path / "short", content(replace(shape, max_position_embeddings=positions)))
    parameters, frequencies = rotary(short)
    assert parameters["original_max_position_embeddings"] < positions or positions == 1
    assert read_shape(short).max_position_embeddings == positions
    torch.testing.assert_close(frequencies, expected, rtol=0 if original == 8192 else 1e-6, atol=0)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mistral"}, "model_type = 'mistral' in config.json is not supported; supported are: llama, qw"),
        ({"model_type": None}, "model_type = None in config.json is not supported"),
        ({"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe' in config.json is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu' in config.json is not supported; supported is 'silu'"),
        ({"attention_bias": True}, "attention_bias = True in config.json is not supported"),
        ({"mlp_bias": True}, "mlp_bias = True in config.json is not supported"),
        ({"is_causal": False}, "is_causal = False in config.json is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window = True in config.json is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "config_groups": {"group_0": {}}}},
            ": quantization_config.quant_method = 'fp8' in config.json is not supported; supported are unquantized wei",
        ),
        ({"quantization_config": 8}, "quantization_config = 8 in config.json is not supported"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "rope_type = 'yarn' in config.json is not supported"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8}}, "low_freq_factor = None in config.json is not a pos"),
        ({"rope_scaling": 8}, "rope_scaling = 8 in config.json is not an object"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type = 'yarn' in config.json is not supported"),
        (
            {"rope_parameters": DEFAULT, "rope_scaling": {"type": "linear"}},
            "rope_type = 'linear' in config.json is not",
        ),
        ({"rope_parameters": {"full_attention": DEFAULT}}, "rope_parameters = {'full_attention': {"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps = nan in config.json is not a positive number"),
        ({"rope_scaling": None, "rope_theta": 10**400}, "0 in config.json is not a positive number"),
        ({"rope_scaling": {**SCALING, "low_freq_factor": 0}}, "low_freq_factor = 0 in config.json is not a positive n"),
        (
            {"rope_scaling": {**SCALING, "original_max_position_embeddings": 2**63}},
            " is not a positive integer below 2",
        ),
        ({"hidden_size": "64"}, "hidden_size = '64' in config.json is not a positive integer"),
        ({"hidden_size": None}, "hidden_size = None in config.json is not a positive integer"),
        ({"num_attention_heads": 0}, "num_attention_heads = 0 in config.json is not a positive integer"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings = 'yes' in config.json is not true or false"),
    ],
)
def test_what_is_refused(change, message, tmp_path):
    folder = write(tmp_path, content() | change)
    with pytest.raises(ConfigError) as error:
        read_shape(folder)
    assert str(error.value).startswith(f"MODEL_DIR = {str(folder)!r}: ")
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("text", "says"),
    [("{", "is not valid JSON"), ("[1]", "holds list, not dict"), (None, "is missing; give the folder of a Hugging")],
)
def test_a_file_that_cannot_be_read_is_one_line(text, says, tmp_path):
    if text is not None:
        write(tmp_path, text)
    with pytest.raises(ConfigError, match=f"config.json {says}"):
        read_shape(tmp_path)
