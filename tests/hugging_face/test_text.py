"""Models as transformers loads them."""

import importlib.util
import json
import shutil

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from mxtrain import ConfigError
from mxtrain.data.tokenizer import load_tokenizer, train_tokenizer
from mxtrain.hugging_face.text import load

TEXT = "def main():\n    return 'naïve café'  # 😀 <|end_of_text|>\n" * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The folder of a Llama with random weights, and of a tokenizer that mxtrain trained."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    text = ["def main():\n    return 'naïve café'\n" * 5, "import sys  # 😀\n"]
    train_tokenizer(text, 320, folder, lambda line: None)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=48, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4)  # far from uniform
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def edit(file, **changes):
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


def test_tokens_are_those_of_mxtrains_loader(copy):
    """Also where the tokenizer cuts texts."""
    limits = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
    edit(copy / "tokenizer.json", truncation=limits)
    own, (_, tokenizer, encode) = load_tokenizer(copy), load(copy)
    assert len(tokenizer) == own.size
    for text in (TEXT, "", " \t\r\n\n  x", "😀 <|end_of_text|> <|begin_of_text|>x", "数\x00\x7f"):
        first, *ids = encode(text)
        assert first == own.bos_id == 0 and ids == own.encoder.encode(text, add_special_tokens=False).ids, text
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_text_begins_with_eos_where_there_is_no_bos_and_the_dtype_is_kept(copy):
    LlamaForCausalLM.from_pretrained(copy, dtype=torch.bfloat16).save_pretrained(copy)
    edit(copy / "tokenizer_config.json", bos_token=None)
    model, _, encode = load(copy)
    assert encode("x")[0] == 1 and model.dtype == torch.bfloat16


def a_pickle(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def code_of_its_own(folder):
    auto = {"AutoConfig": "model.Config", "AutoModelForCausalLM": "model.Model"}
    (folder / "model.py").write_text("raise SystemExit('this code ran')")
    edit(folder / "config.json", auto_map=auto, model_type="another")


DAMAGE = {
    "vocabulary": (lambda folder: edit(folder / "config.json", vocab_size=321), "transformers cannot load it: "),
    "layers": (
        lambda folder: edit(folder / "config.json", num_hidden_layers=3),
        "9 weights are missing, such as model.layers.2.input_layernorm.weight",
    ),
    "pickle": (a_pickle, "transformers cannot load it: "),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "transformers cannot load it: "),
    "code": (code_of_its_own, "transformers cannot load it: "),
    "experts": (
        lambda folder: edit(
            folder / "config.json",
            num_experts_per_tok=2,
            quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        ),
        "transformers cannot read experts in 'nvfp4-pack-quantized'; name the run, or an export with --format hf",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_model_that_cannot_be_used_is_refused_in_one_line(copy, case):
    damage, says = DAMAGE[case]
    damage(copy)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    message = str(caught.value)
    assert message.startswith(f"RUN = {str(copy)!r}: {says}") and "\n" not in message


def test_without_transformers_one_line_says_what_to_install(folder, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(
        ConfigError, match=r'^this command needs transformers, which is not installed; run: pip install "mxtrain\[hf]"$'
    ):
        load(folder)
