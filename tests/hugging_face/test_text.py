"""Models as transformers loads them, their texts, and figures against computations by hand."""

import importlib.util
import json
import math
import shutil

import pytest
import torch
from tokenizers import normalizers
from transformers import LlamaConfig, LlamaForCausalLM

from mxtrain import ConfigError
from mxtrain.data.tokenizer import load_tokenizer, train_tokenizer
from mxtrain.hugging_face.text import evaluate, generate, load, windows

TEXT = "def main():\n    return 'naïve café'  # 😀 <|end_of_text|>\n" * 3
SHORT = "return 'café'\n"


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


@pytest.fixture(scope="module")
def pretrained(folder):
    loaded = load(folder)
    loaded.model.generation_config.eos_token_id = None  # random weights would end a text anywhere
    return loaded


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def tensor(pretrained, tokens: list[int]) -> torch.Tensor:
    """A batch of one sequence, where the model is."""
    return torch.tensor([tokens], device=pretrained.model.device)


def ids_of(pretrained, text: str) -> list[int]:
    return pretrained.encode(text)[0]


def edit(file, **changes):
    content = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({name: value for name, value in content.items() if value is not None}))


@pytest.mark.parametrize("is_cut", [False, True])
def test_tokens_are_those_of_mxtrains_loader(is_cut, copy):
    """Also where the tokenizer cuts texts, and its special tokens are named in the older file."""
    if is_cut:
        (copy / "tokenizer_config.json").rename(copy / "special_tokens_map.json")
        limits = {"max_length": 4, "stride": 0, "strategy": "LongestFirst", "direction": "Right"}
        edit(copy / "tokenizer.json", truncation=limits)
    own, theirs = load_tokenizer(copy), load(copy)
    assert theirs.first_token == own.bos_id == 0 and len(theirs.tokenizer) == own.size
    for text in (TEXT, "", " \t\r\n\n  x", "😀 <|end_of_text|> <|begin_of_text|>x", "数\x00\x7f"):
        ids = ids_of(theirs, text)
        assert ids == own.encoder.encode(text, add_special_tokens=False).ids, text
        assert theirs.tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text


def test_a_text_begins_with_eos_where_there_is_no_bos_and_the_dtype_is_kept(copy):
    LlamaForCausalLM.from_pretrained(copy, dtype=torch.bfloat16).save_pretrained(copy)
    edit(copy / "tokenizer_config.json", bos_token=None)
    loaded = load(copy)
    assert loaded.first_token == 1 and loaded.model.dtype == torch.bfloat16


def a_pickle(folder):
    torch.save({}, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def code_of_its_own(folder):
    auto = {"AutoConfig": "model.Config", "AutoModelForCausalLM": "model.Model"}
    (folder / "model.py").write_text("raise SystemExit('this code ran')")
    edit(folder / "config.json", auto_map=auto, model_type="another")


HALF_ROTATED = {
    "rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "partial_rotary_factor": 0.5,
}  # fmt: skip
DAMAGE = {
    "special tokens": (
        lambda folder: edit(folder / "tokenizer_config.json", bos_token=None, eos_token=None),
        "its tokenizer has neither a bos nor an eos token",
    ),
    "vocabulary": (lambda folder: edit(folder / "config.json", vocab_size=321), "2 of the model's weights are missing"),
    "depth": (lambda folder: edit(folder / "config.json", num_hidden_layers=3), "9 of the model's weights are missing"),
    "weights": (
        lambda folder: (folder / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0garbage!"),
        "transformers cannot load it: ",
    ),
    "pickle": (a_pickle, "transformers cannot load it: "),
    "rotation": (
        lambda folder: edit(folder / "config.json", rope_parameters=HALF_ROTATED),
        "transformers cannot run it: The size of tensor a (8) must match",
    ),
    "config": (lambda folder: (folder / "config.json").write_text("{"), "transformers cannot load it: "),
    "tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "it has no tokenizer"),
    "code": (code_of_its_own, "transformers cannot load it: "),
    "experts": (
        lambda folder: edit(
            folder / "config.json",
            num_experts_per_tok=2,
            quantization_config={"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        ),
        "transformers cannot read experts in 'nvfp4-pack-quantized'; give the run, or an export with --format hf",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_model_that_cannot_be_used_is_refused_in_one_line(copy, case):
    damage, says = DAMAGE[case]
    damage(copy)
    with pytest.raises(ConfigError) as caught:
        load(copy)
    message = str(caught.value)
    assert message.startswith(f"RUN = {str(copy)!r}: {says}") and "\n" not in message and len(message) < 500


def test_without_transformers_one_line_says_what_to_install(folder, monkeypatch):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "transformers" else find_spec(name))
    with pytest.raises(ConfigError, match=r'^transformers is not installed.*: pip install "mxtrain\[hf]"$'):
        load(folder)


DRAWN = {"do_sample": True, "temperature": 0.8, "top_p": 0.95, "top_k": 0}


@pytest.fixture
def text_of(pretrained, capsys):
    def text_of(prompt="def main", max_new_tokens=12, seed=None, model=pretrained, **sampling):
        drawn = {} if sampling.get("do_sample") is False else DRAWN
        generate(model, prompt, max_new_tokens, seed, **{**drawn, **sampling})
        return capsys.readouterr().out

    return text_of


def test_a_seed_gives_its_own_text(text_of):
    texts = [text_of(seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and text_of() != text_of()
    assert all(text.startswith("def main") and text.endswith("\n") for text in texts)
    assert text_of("", max_new_tokens=5).strip()


def test_the_likeliest_token_is_taken_after_bos_and_prompt(pretrained, text_of):
    tokens = [0, *ids_of(pretrained, "def main")]
    for _ in range(12):
        with torch.no_grad():
            tokens.append(pretrained.model(tensor(pretrained, tokens)).logits[0, -1].argmax().item())
    expected = pretrained.tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert text_of(do_sample=False) == text_of(top_p=1e-6) == text_of(temperature=1e-4) == expected


STOPS = {"stop_strings": ["e"], "max_time": 1e-6}
BEAMS = {"num_beams": 2, "num_return_sequences": 2}
PENALTIES = {"repetition_penalty": 9.0, "no_repeat_ngram_size": 1, "suppress_tokens": [*range(2, 300)], "min_p": 0.9}


@pytest.mark.parametrize("given", [PENALTIES, BEAMS, STOPS], ids="-".join)
def test_the_command_line_alone_says_how_tokens_are_chosen(given, copy, text_of):
    """Of the model's own settings, in either file, only the eos tokens count."""
    edit(copy / "generation_config.json", **given, do_sample=True, temperature=0.1, eos_token_id=[2, 3])
    edit(copy / "config.json", **given)
    own = load(copy)
    assert own.model.generation_config.eos_token_id == [2, 3]
    own.model.generation_config.eos_token_id = None
    for sampling in ({"do_sample": False}, {}):
        assert text_of(seed=1, model=own, **sampling) == text_of(seed=1, **sampling)


def test_an_eos_token_ends_the_text(pretrained, text_of, monkeypatch):
    tokens = tensor(pretrained, [0, *ids_of(pretrained, "def main")])
    with torch.no_grad():
        likeliest = pretrained.model(tokens).logits[0, -1].argmax().item()
    monkeypatch.setattr(pretrained.model.generation_config, "eos_token_id", likeliest)
    assert text_of(do_sample=False) == "def main" + pretrained.tokenizer.decode([likeliest]) + "\n"


def test_text_appears_while_it_is_made(pretrained, monkeypatch):
    pieces = []
    monkeypatch.setattr("builtins.print", lambda text, **options: pieces.append((text, options.get("flush"))))
    generate(pretrained, "a b c d\n", 30, seed=3, **DRAWN)
    assert len(pieces) > 5 and all(flush for _, flush in pieces)


def test_a_text_is_as_long_as_the_model_allows(pretrained, text_of):
    prompt = "x" * 37
    assert text_of(prompt, None, seed=0) == text_of(prompt, 10, seed=0)
    with pytest.raises(ConfigError, match="^--max-new-tokens = 47 after a prompt of 2 tokens exceeds the .* 48: "):
        text_of("x", 47)
    with pytest.raises(ConfigError, match="^TEXT has 48 tokens, bos included, and the model's longest sequence has 48"):
        text_of("x" * 47)


def surprise(pretrained, context: list[int], token: int) -> float:
    """-ln of the probability of ``token`` after ``context``."""
    with torch.no_grad():
        logits = pretrained.model(tensor(pretrained, context)).logits[0, -1].double()
    return -logits.log_softmax(0)[token].item()


def expected_nats(pretrained, ids: list[int], first_context) -> float:
    """Sum over all tokens; ``first_context(i)`` is where the context of token i begins, 0 for the bos token."""
    tokens = [0, *ids]
    return sum(surprise(pretrained, tokens[first_context(i) : i + 1], ids[i]) for i in range(len(ids)))


def figures(evaluation) -> dict[str, float]:
    rows = str(evaluation).splitlines()
    return {row[:12].strip(): float(row[12:].split()[0].replace(",", "")) for row in rows}


def test_a_short_text_is_predicted_from_all_that_stands_before(pretrained):
    ids = ids_of(pretrained, SHORT)
    found = evaluate(pretrained, [SHORT])
    assert found.nats == pytest.approx(expected_nats(pretrained, ids, lambda i: 0), rel=1e-5)
    loss = found.nats / len(ids)
    expected = {"loss": loss, "perplexity": math.exp(loss), "bits/byte": found.nats / 0.6931471805599453 / 15}
    assert figures(found) == pytest.approx({**expected, "tokens": len(ids), "bytes": 15}, rel=1e-4)


@pytest.mark.parametrize("seq_len, stride", [(8, 1), (10, None)])
def test_windows_give_a_token_its_context(seq_len, stride, pretrained):
    """By default windows overlap only at the end; with a stride of one every token sees a whole window."""
    ids = ids_of(pretrained, TEXT)
    assert len(ids) % 10 not in (0, 9)
    last = len(ids) - 10

    def first_context(i):
        if stride == 1:
            return max(0, i - 7)
        return last if i >= len(ids) // 10 * 10 else i // 10 * 10

    found = evaluate(pretrained, [TEXT], seq_len, stride)
    assert found.nats == pytest.approx(expected_nats(pretrained, ids, first_context), rel=1e-5)


@pytest.mark.parametrize(("count", "seq_len", "stride"), [(1, 8, 8), (8, 8, 3), (9, 8, 8), (30, 8, 3), (30, 7, 7)])
def test_windows_predict_every_token_once(count, seq_len, stride):
    predicted = []
    for begin, end, scored in windows(count, seq_len, stride):
        assert 0 <= begin < end <= count and scored <= end - begin <= seq_len
        assert end - begin == min(seq_len, count)  # as much context as fits
        predicted.extend(range(end - scored, end))
    assert predicted == list(range(count))


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_every_token(folder):
    """Of each of several documents, whose figures add up."""
    pretrained = load(folder)
    with torch.no_grad():
        pretrained.model.lm_head.weight.zero_()
    found = evaluate(pretrained, [TEXT, "x"])
    tokens, size = len(ids_of(pretrained, TEXT)) + 1, len(TEXT.encode()) + 1
    assert (found.tokens, found.bytes) == (tokens, size)
    assert figures(found)["perplexity"] == pytest.approx(320)
    assert figures(found)["bits/byte"] == pytest.approx(math.log2(320) * tokens / size, abs=1e-4)


def test_the_loss_of_a_bf16_model_is_computed_in_fp32(folder):
    """A sum in bf16 has two or three digits."""
    pretrained = load(folder)
    pretrained.model.to(torch.bfloat16)
    tokens = tensor(pretrained, [pretrained.first_token, *ids_of(pretrained, SHORT)])
    with torch.no_grad():
        logits = pretrained.model(tokens[:, :-1]).logits[0].double()
    expected = -logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).sum().item()
    assert evaluate(pretrained, [SHORT]).nats == pytest.approx(expected, rel=1e-5)


def test_a_limit_of_tokens_counts_the_bytes_that_they_are(pretrained):
    text = "ab𝄞cd"  # four bytes, and four tokens, that the tokenizer did not see
    ids = ids_of(pretrained, text)
    assert len(ids) == 8
    sizes = [evaluate(pretrained, [text, "xyz"], max_tokens=n) for n in range(1, 12)]
    assert [found.bytes for found in sizes] == [1, 2, 2, 2, 2, 6, 7, 8, 9, 10, 11]
    assert [found.tokens for found in sizes] == [1, 2, 2, 2, 2, 6, 7, 8, 9, 10, 11]
    assert sizes[1].nats == pytest.approx(expected_nats(pretrained, ids[:2], lambda i: 0), rel=1e-5)
    with pytest.raises(ConfigError, match="^--max-tokens = 2 ends within a character"):
        evaluate(pretrained, ["𝄞"], max_tokens=2)


@pytest.mark.parametrize("text, counts", [("a\ufffdb", (1, 1, 1, 4, 5)), ("xe\u0301y", (1, 2, 5))])
def test_a_limit_counts_neither_replaced_nor_normalized_characters(text, counts, folder):
    """The text is cut itself, and what remains is tokenized: e and an accent would become one character."""
    pretrained = load(folder)
    pretrained.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    sizes = [evaluate(pretrained, [text], max_tokens=n) for n in range(1, len(counts) + 1)]
    assert tuple(found.bytes for found in sizes) == counts


@pytest.mark.parametrize(
    "numbers, says",
    [
        ({"seq_len": 49}, "--seq-len = 49 is longer than the model's longest sequence, 48"),
        ({"seq_len": 8, "stride": 9}, "--stride = 9 is larger than the windows, --seq-len = 8"),
    ],
)
def test_windows_that_do_not_fit_are_refused(pretrained, numbers, says):
    with pytest.raises(ConfigError, match=f"^{says}"):
        evaluate(pretrained, [TEXT], **numbers)
