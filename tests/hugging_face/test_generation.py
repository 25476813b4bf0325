"""Generated text: transformers' sampler with our settings."""

import pytest
import torch

from mxtrain import ConfigError
from mxtrain.hugging_face.generation import Sampling, generate
from mxtrain.hugging_face.pretrained import load


@pytest.fixture(scope="module")
def pretrained(tiny_model):
    loaded = load(tiny_model)
    loaded.model.generation_config.eos_token_id = None  # random weights would end a text anywhere
    return loaded


@pytest.fixture
def text_of(pretrained, capsys):
    def text_of(prompt="def main", **sampling):
        generate(pretrained, prompt, Sampling(**sampling))
        return capsys.readouterr().out

    return text_of


def test_the_same_seed_gives_the_same_text(text_of):
    texts = [text_of(seed=seed) for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(text.startswith("def main") and text.endswith("\n") for text in texts)


def test_without_a_seed_texts_differ(text_of):
    assert text_of() != text_of()


def test_greedy_takes_the_likeliest_token_after_bos_and_prompt(pretrained, text_of):
    tokens = [0, *pretrained.encode("def main")]
    for _ in range(12):
        with torch.no_grad():
            tokens.append(pretrained.model(torch.tensor([tokens])).logits[0, -1].argmax().item())
    expected = pretrained.tokenizer.decode(tokens, skip_special_tokens=True) + "\n"
    assert text_of(greedy=True, max_new_tokens=12) == expected
    assert text_of(top_p=1e-6, temperature=3.0, max_new_tokens=12) == expected
    assert text_of(top_p=1.0, temperature=1e-4, max_new_tokens=12) == expected


def test_an_eos_token_ends_the_text(pretrained, text_of, monkeypatch):
    tokens = torch.tensor([[0, *pretrained.encode("def main")]])
    with torch.no_grad():
        likeliest = pretrained.model(tokens).logits[0, -1].argmax().item()
    monkeypatch.setattr(pretrained.model.generation_config, "eos_token_id", likeliest)
    assert text_of(greedy=True) == "def main" + pretrained.decode([likeliest]) + "\n"


def test_nothing_but_temperature_and_top_p_limits_the_choice(pretrained, monkeypatch):
    """transformers' default top_k of 50 would leave out the tokens of a flat distribution."""
    seen = {}
    monkeypatch.setattr(pretrained.model, "generate", lambda inputs, **options: seen.update(options))
    generate(pretrained, "x", Sampling(temperature=0.5, top_p=0.9))
    assert (seen["do_sample"], seen["temperature"], seen["top_p"], seen["top_k"]) == (True, 0.5, 0.9, 0)


def test_text_appears_while_it_is_made(pretrained, monkeypatch):
    pieces = []
    monkeypatch.setattr("builtins.print", lambda text, **options: pieces.append((text, options.get("flush"))))
    generate(pretrained, "a b c d\n", Sampling(seed=3, max_new_tokens=30))
    assert len(pieces) > 5 and all(flush for _, flush in pieces)


def test_an_empty_prompt_begins_a_text(text_of):
    assert text_of("", greedy=True, max_new_tokens=5).strip()


def test_the_default_length_is_what_fits(pretrained, text_of):
    prompt = "x" * (pretrained.max_seq_len - 11)
    assert len(pretrained.encode(prompt)) == pretrained.max_seq_len - 11
    assert text_of(prompt, seed=0) == text_of(prompt, seed=0, max_new_tokens=10)


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ("x", {"max_new_tokens": 0}, "--max-new-tokens = 0 is not an integer of at least 1"),
        ("x", {"max_new_tokens": 47}, "--max-new-tokens = 47 after a prompt of 2 tokens exceeds the model's longest"),
        ("x" * 47, {}, "TEXT has 48 tokens, bos included, and the model's longest sequence has 48"),
        ("x", {"temperature": 0.0}, "--temperature = 0.0 is not a positive number; --greedy stands for 0"),
        ("x", {"temperature": float("nan")}, "--temperature = nan is not a positive"),
        ("x", {"temperature": float("inf")}, "--temperature = inf is not a positive"),
        ("x", {"top_p": 0.0}, "--top-p = 0.0 is not above 0"),
        ("x", {"top_p": 1.1}, "--top-p = 1.1 is not above 0"),
        ("x", {"seed": -1}, "--seed = -1 is not an integer from 0"),
        ("x", {"seed": 2**64}, f"--seed = {2**64} is not an integer from 0"),
    ],
)
def test_bad_input_is_refused(pretrained, prompt, sampling, says):
    with pytest.raises(ConfigError) as caught:
        generate(pretrained, prompt, Sampling(**sampling))
    assert str(caught.value).startswith(says)
