import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import transformers
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from mxtrain.errors import ConfigError
from mxtrain.hugging_face import model_config
from mxtrain.hugging_face.model_config import (
    CONFIG_FILE,
    FROM_CONFIG,
    GENERATION_FILE,
    ModelShape,
    config_json,
    read_generation,
    read_shape,
)

FACTORS = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
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
    rope_scaling={**FACTORS, "original_max_position_embeddings": 8192},
    tie_word_embeddings=False,
    max_position_embeddings=131072,
)
QWEN = replace(LLAMA, model_type="qwen3", head_dim=32, rope_scaling=None, tie_word_embeddings=True)
EXPERTS = replace(
    QWEN,
    model_type="qwen3_moe",
    own={"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
)


def write(folder, config):
    folder.mkdir(exist_ok=True)
    (folder / CONFIG_FILE).write_text(json.dumps(config) if isinstance(config, dict) else config)
    return folder


def content(shape=LLAMA):
    return config_json(shape, "float32", {"bos_token_id": 0, "eos_token_id": 1})


@pytest.mark.parametrize("shape", [LLAMA, QWEN, replace(LLAMA, rope_scaling=None), EXPERTS])
def test_a_shape_is_read_as_it_or_transformers_wrote_it(shape, tmp_path):
    assert read_shape(write(tmp_path / "a", content(shape))) == shape
    transformers.AutoConfig.from_pretrained(tmp_path / "a").save_pretrained(tmp_path / "b")
    assert "rope_parameters" in json.loads((tmp_path / "b" / CONFIG_FILE).read_text()), "the names of transformers 5"
    assert read_shape(tmp_path / "b") == shape


def test_a_scaling_by_one_is_none(tmp_path):
    config = content(replace(LLAMA, rope_scaling=LLAMA.rope_scaling | {"factor": 1.0}))
    assert read_shape(write(tmp_path, config)) == replace(LLAMA, rope_scaling=None)


def test_the_names_of_transformers_4_are_read(tmp_path, monkeypatch):
    """Its configs have the base, and the scaling, as fields of their own."""
    config = transformers.AutoConfig.from_pretrained(write(tmp_path, content(LLAMA)))
    older = SimpleNamespace(**{name: getattr(config, name) for name in (*FROM_CONFIG, "hidden_act", "rms_norm_eps")})
    older.rope_scaling = {name: value for name, value in config.rope_parameters.items() if name != "rope_theta"}
    older.rope_theta = 500000
    monkeypatch.setattr(model_config, "from_pretrained", lambda *arguments: older)
    assert read_shape(tmp_path) == LLAMA
    older.rope_scaling = None
    assert read_shape(tmp_path) == replace(LLAMA, rope_scaling=None)


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


@pytest.mark.parametrize("original, positions", [(8192, 128), (8192, 8192), (1000, 100), (8192, 1)])
def test_a_short_context_has_the_same_frequencies_without_a_warning(original, positions, tmp_path):
    """transformers warns at every load unless original_max_position_embeddings is below the number of positions."""
    shape = replace(LLAMA, head_dim=128, rope_scaling={**FACTORS, "original_max_position_embeddings": original})
    _, expected = rotary(write(tmp_path / "long", content(shape)))
    short = write(tmp_path / "short", content(replace(shape, max_position_embeddings=positions)))
    parameters, frequencies = rotary(short)
    assert parameters["original_max_position_embeddings"] < positions or positions == 1
    assert read_shape(short).max_position_embeddings == positions
    torch.testing.assert_close(frequencies, expected, rtol=0 if original == 8192 else 1e-6, atol=0)


@pytest.mark.parametrize(
    "change, facts",
    [
        ({"model_type": "mistral"}, ("model_type = 'mistral'", "not one of: 'llama', 'qwen3', 'qwen3_moe'")),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, ("decoder_sparse_step = 2", "is not one of: 1")),
        ({"hidden_act": "gelu"}, ("hidden_act = 'gelu'", "'silu'")),
        ({"use_sliding_window": True}, ("use_sliding_window = True",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config = ", "'fp8'", "models without it")),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 8.0}}, ("rope_type = 'yarn'", "'default', 'llama3'")),
        ({"hidden_size": "64"}, ("hidden_size", "'64'")),
    ],
)
def test_what_is_refused(change, facts, tmp_path):
    folder = write(tmp_path, content() | change)
    with pytest.raises(ConfigError) as error:
        read_shape(folder)
    message = str(error.value)
    assert message.startswith(f"MODEL_DIR = {str(folder)!r}: ") and "\n" not in message
    assert all(fact in message for fact in facts)


@pytest.mark.parametrize(("text", "says"), [("{", "JSON"), (None, "config.json is missing; name the folder of a")])
def test_a_file_that_cannot_be_read_is_one_line(text, says, tmp_path):
    if text is not None:
        write(tmp_path, text)
    with pytest.raises(ConfigError, match=says):
        read_shape(tmp_path)
