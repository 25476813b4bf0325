"""Models and tokenizers as transformers loads them."""

import importlib.util
import json
import shutil

import pytest
import torch

from mxtrain import ConfigError
from mxtrain.data.tokenizer import load_tokenizer
from mxtrain.hugging_face.pretrained import load

TEXTS = (
    "def main():\n    return 'naïve café'\n",
    "",
    " \t\r\n\n  x",
    "😀 <|end_of_text|> <|begin_of_text|>x",
    "数\x00\x7f",
)


def test_tokens_are_those_of_mxtrains_loader(tiny_model):
    own, theirs = load_tokenizer(tiny_model), load(tiny_model)
    assert (theirs.tokenizer.bos_token_id, theirs.tokenizer.eos_token_id) == (own.bos_id, own.eos_id) == (0, 1)
    assert len(theirs.tokenizer) == own.size
    for text in TEXTS:
        ids = theirs.encode(text)
        assert ids == own.encoder.encode(text, add_special_tokens=False).ids, text
        assert theirs.decode(ids) == text


@pytest.fixture
def copy(tiny_model, tmp_path):
    return shutil.copytree(tiny_model, tmp_path / "copy")


def edit(file, **changes):
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_a_text_begins_with_eos_where_there_is_no_bos(copy):
    edit(copy / "tokenizer_config.json", bos_token=None)
    assert load(copy).first_token == 1


def test_a_text_begins_with_the_token_of_prepared_text_and_is_not_cut(copy):
    (copy / "tokenizer_config.json").rename(copy / "special_tokens_map.json")
    limits = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    edit(copy / "tokenizer.json", truncation=limits)
    own, theirs = load_tokenizer(copy), load(copy)
    assert theirs.first_token == own.bos_id == 0
    assert theirs.encode(TEXTS[0]) == own.encoder.encode(TEXTS[0], add_special_tokens=False).ids
    assert theirs.decode(theirs.encode(TEXTS[0])) == TEXTS[0]


def test_the_models_own_dtype_is_kept(copy):
    from transformers import LlamaForCausalLM

    LlamaForCausalLM.from_pretrained(copy, dtype=torch.bfloat16).save_pretrained(copy)
    assert load(copy).model.dtype == torch.bfloat16


def no_special_tokens(folder):
    edit(folder / "tokenizer_config.json", bos_token=None, eos_token=None)


def another_vocabulary(folder):
    edit(folder / "config.json", vocab_size=321)


def another_depth(folder):
    edit(folder / "config.json", num_hidden_layers=3)


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def damaged_weights(folder):
    (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!")


def a_pickle(folder):
    torch.save({}, folder / "pytorch_model.bin")
    no_weights(folder)


def damaged_config(folder):
    (folder / "config.json").write_text("{")


def no_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def code_of_its_own(folder):
    auto = {"AutoConfig": "model.Config", "AutoModelForCausalLM": "model.Model"}
    (folder / "model.py").write_text("raise SystemExit('this code ran')")
    edit(folder / "config.json", auto_map=auto, model_type="another")


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (no_special_tokens, "its tokenizer has neither a bos nor an eos token"),
        (
            another_vocabulary,
            "2 of the model's weights have another shape than in config.json, such as lm_head.weight with [320, 32] "
            "instead of [321, 32]",
        ),
        (another_depth, "9 of the model's weights are missing, such as model.layers.2."),
        (no_weights, "transformers cannot load it: "),
        (damaged_weights, "transformers cannot load it: "),
        (a_pickle, "transformers cannot load it: "),
        (damaged_config, "transformers cannot load it: "),
        (no_tokenizer, "it has no tokenizer"),
        (code_of_its_own, "transformers cannot load it: "),
    ],
)
def test_a_model_that_cannot_be_used_is_refused_in_one_line(copy, damage, says):
    damage(copy)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    message = str(caught.value)
    assert message.startswith(f"RUN = {str(copy)!r}: {says}") and "\n" not in message and len(message) < 500


def test_without_transformers_one_line_says_what_to_install(tiny_model, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(ConfigError, match=r'^transformers is not installed.*: pip install "mxtrain\[hf\]"$'):
        load(tiny_model)
