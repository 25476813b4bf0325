"""Loss, perplexity and bits per byte against computations by hand."""

import math

import pytest
import torch
from tokenizers import normalizers

from mxtrain import ConfigError
from mxtrain.hugging_face.evaluation import Reading, evaluate, read_texts, windows
from mxtrain.hugging_face.pretrained import load

TEXT = "def main():\n    return 'naïve café'  # 😀 <|end_of_text|>\n" * 3


@pytest.fixture(scope="module")
def pretrained(tiny_model):
    return load(tiny_model)


def surprise(pretrained, context: list[int], token: int) -> float:
    """-ln of the probability of ``token`` after ``context``."""
    with torch.no_grad():
        logits = pretrained.model(torch.tensor([context])).logits[0, -1].double()
    return -logits.log_softmax(0)[token].item()


def expected_nats(pretrained, ids: list[int], first_context) -> float:
    """Sum over all tokens; ``first_context(i)`` is where the context of token i begins, 0 for the bos token."""
    tokens = [0, *ids]
    return sum(surprise(pretrained, tokens[first_context(i) : i + 1], ids[i]) for i in range(len(ids)))


def test_a_short_text_is_predicted_from_all_that_stands_before(pretrained):
    text = "return 'café'\n"
    ids = pretrained.encode(text)
    assert len(ids) < pretrained.max_seq_len
    found = evaluate(pretrained, [text], Reading())
    assert found.nats == pytest.approx(expected_nats(pretrained, ids, lambda i: 0), rel=1e-5)
    assert (found.tokens, found.bytes) == (len(ids), len(text) + 1)
    assert found.loss == found.nats / len(ids) and found.perplexity == math.exp(found.loss)
    assert found.bits_per_byte == pytest.approx(found.nats / 0.6931471805599453 / 15)


def test_a_stride_of_one_gives_every_token_a_whole_window(pretrained):
    ids = pretrained.encode(TEXT)
    found = evaluate(pretrained, [TEXT], Reading(seq_len=8, stride=1))
    assert found.nats == pytest.approx(expected_nats(pretrained, ids, lambda i: max(0, i - 7)), rel=1e-5)


def test_by_default_windows_overlap_only_at_the_end(pretrained):
    ids = pretrained.encode(TEXT)
    assert len(ids) % 10 not in (0, 9)
    last = len(ids) - 10

    def first_context(i):
        return last if i >= len(ids) // 10 * 10 else i // 10 * 10

    found = evaluate(pretrained, [TEXT], Reading(seq_len=10))
    assert found.nats == pytest.approx(expected_nats(pretrained, ids, first_context), rel=1e-5)


@pytest.mark.parametrize(("count", "seq_len", "stride"), [(1, 8, 8), (8, 8, 3), (9, 8, 8), (30, 8, 3), (30, 7, 7)])
def test_windows_predict_every_token_once(count, seq_len, stride):
    predicted = []
    for begin, end, scored in windows(count, seq_len, stride):
        assert 0 <= begin < end <= count and scored <= end - begin <= seq_len
        assert end - begin == min(seq_len, count)  # as much context as fits
        predicted.extend(range(end - scored, end))
    assert predicted == list(range(count))


def test_a_uniform_model_needs_log2_of_the_vocabulary_for_every_token(tiny_model):
    pretrained = load(tiny_model)
    with torch.no_grad():
        pretrained.model.lm_head.weight.zero_()
    found = evaluate(pretrained, [TEXT, "x"], Reading())
    tokens, size = len(pretrained.encode(TEXT)) + 1, len(TEXT.encode()) + 1
    assert (found.tokens, found.bytes) == (tokens, size)
    assert found.perplexity == pytest.approx(320)
    assert found.bits_per_byte == pytest.approx(math.log2(320) * tokens / size)


def test_the_loss_of_a_bf16_model_is_computed_in_fp32(tiny_model):
    """A sum in bf16 has two or three digits."""
    pretrained = load(tiny_model)
    pretrained.model.to(torch.bfloat16)
    tokens = torch.tensor([[pretrained.first_token, *pretrained.encode("return 'café'\n")]])
    with torch.no_grad():
        logits = pretrained.model(tokens[:, :-1]).logits[0].double()
    expected = -logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).sum().item()
    assert evaluate(pretrained, ["return 'café'\n"], Reading()).nats == pytest.approx(expected, rel=1e-5)


def test_texts_are_documents_of_their_own(pretrained):
    texts = (TEXT, "x = 1\n")
    whole, parts = evaluate(pretrained, texts, Reading()), [evaluate(pretrained, [t], Reading()) for t in texts]
    assert whole.nats == pytest.approx(sum(part.nats for part in parts))
    assert whole.tokens == sum(part.tokens for part in parts)


def test_a_limit_of_tokens_counts_the_bytes_that_they_are(pretrained):
    text = "ab𝄞cd"  # four bytes, and four tokens, that the tokenizer did not see
    ids = pretrained.encode(text)
    assert len(ids) == 8
    sizes = [evaluate(pretrained, [text, "xyz"], Reading(max_tokens=n)) for n in range(1, 12)]
    assert [found.bytes for found in sizes] == [1, 2, 2, 2, 2, 6, 7, 8, 9, 10, 11]
    assert [found.tokens for found in sizes] == [1, 2, 2, 2, 2, 6, 7, 8, 9, 10, 11]
    assert sizes[1].nats == pytest.approx(expected_nats(pretrained, ids[:2], lambda i: 0), rel=1e-5)
    with pytest.raises(ConfigError, match="^--max-tokens = 2 ends within a character"):
        evaluate(pretrained, ["𝄞"], Reading(max_tokens=2))


def test_a_part_of_a_character_is_not_the_replacement_character(pretrained):
    text = "a\ufffdb"
    assert len(pretrained.encode(text)) == 5
    sizes = [evaluate(pretrained, [text], Reading(max_tokens=n)) for n in range(1, 6)]
    assert [(found.tokens, found.bytes) for found in sizes] == [(1, 1), (1, 1), (1, 1), (4, 4), (5, 5)]


def test_a_limit_of_tokens_counts_the_bytes_before_they_are_normalized(tiny_model):
    pretrained = load(tiny_model)
    pretrained.tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    text = "xe\u0301y"  # e and an accent, which become one character
    assert pretrained.decode(pretrained.encode(text)) == "x\u00e9y"
    every = len(pretrained.encode(text))
    sizes = [evaluate(pretrained, [text], Reading(max_tokens=n)) for n in (1, every - 1, every)]
    assert [(found.tokens, found.bytes) for found in sizes] == [(1, 1), (every - 1, 4), (every, 5)]


@pytest.mark.parametrize(
    ("reading", "says"),
    [
        ({"seq_len": 0}, "--seq-len = 0 is not an integer of at least 1"),
        ({"stride": -1}, "--stride = -1 is not"),
        ({"max_tokens": 0}, "--max-tokens = 0 is not"),
        ({"seq_len": 49}, "--seq-len = 49 is longer than the model's longest sequence, 48"),
        ({"seq_len": 8, "stride": 9}, "--stride = 9 is larger than the windows, --seq-len = 8"),
    ],
)
def test_numbers_out_of_range_are_refused(pretrained, reading, says):
    with pytest.raises(ConfigError) as caught:
        evaluate(pretrained, [TEXT], Reading(**reading))
    assert str(caught.value).startswith(says)


def test_line_ends_are_part_of_the_text(tmp_path):
    file = tmp_path / "file"
    file.write_bytes(b"a\r\nb\r")
    assert read_texts([file]) == ["a\r\nb\r"]
