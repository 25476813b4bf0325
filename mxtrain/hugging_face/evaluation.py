"""``mxtrain eval``: loss, perplexity and bits per byte of a model on text."""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from mxtrain.errors import ConfigError, require_positive_integer
from mxtrain.files import reason
from mxtrain.hugging_face.pretrained import Pretrained

_BYTES_PER_CHARACTER = 4  # in UTF-8, at most


@dataclass(frozen=True)
class Evaluation:
    nats: float
    """Cross entropy of all tokens, summed"""
    tokens: int
    """Number of tokens that were predicted: those of the text. The first token (bos) is given, and no eos is added."""
    bytes: int
    """Bytes of the text in UTF-8"""

    @property
    def loss(self) -> float:
        """Nats per token."""
        return self.nats / self.tokens

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity where that overflows."""
        return math.exp(self.loss) if self.loss < 709 else math.inf

    @property
    def bits_per_byte(self) -> float:
        """Independent of the tokenizer."""
        return self.nats / math.log(2) / self.bytes

    def __str__(self) -> str:
        return (
            f"loss        {self.loss:.4f} nats per token\n"
            f"perplexity  {self.perplexity:,.4f} per token\n"
            f"bits/byte   {self.bits_per_byte:.4f}\n"
            f"tokens      {self.tokens:,}\n"
            f"bytes       {self.bytes:,}"
        )


@dataclass(frozen=True)
class Reading:
    """How texts are read.

    Attributes:
        seq_len: tokens of an input at most; None takes the model's longest sequence.
        stride: tokens that each window after the first predicts (see ``windows``); None takes seq_len.
        max_tokens: stop after this many tokens, or a few earlier, where a character ends; None reads all.

    Raises:
        ConfigError: for a number out of range.
    """

    seq_len: int | None = None
    stride: int | None = None
    max_tokens: int | None = None

    def __post_init__(self):
        for name, value in vars(self).items():
            if value is not None:
                require_positive_integer(f"--{name.replace('_', '-')}", value)


def windows(count: int, seq_len: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut a text of ``count`` tokens, after its first token, into inputs of at most ``seq_len`` tokens.

    Every token is predicted once. The first window predicts as many as fit; every later one reaches back to be as long,
    and predicts the next ``stride``. With stride = seq_len only the last window overlaps the one before it, and the
    windows are those of ``get_rolling_token_windows`` in lm-evaluation-harness. A smaller stride gives each token more
    context, and takes longer.

    Yields:
        begin, end, scored: the input is tokens [begin, end), the model predicts the token after each, and the last
        ``scored`` predictions count.
    """
    done = 0
    while done < count:
        scored = min(stride if done else seq_len, count - done)
        done += scored
        yield max(0, done - seq_len), done, scored


def read_texts(files: Iterable[Path]) -> list[str]:
    """Read text files. Raises ConfigError for a file that cannot be read, is empty or is not UTF-8."""
    texts = []
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except OSError as error:
            raise ConfigError(f"FILE = {str(file)!r} cannot be read: {reason(error)}") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"FILE = {str(file)!r} is not UTF-8 text: byte {error.start} is wrong") from error
        if not text:
            raise ConfigError(f"FILE = {str(file)!r} is empty")
        texts.append(text)
    return texts


def evaluate(pretrained: Pretrained, texts: Iterable[str], reading: Reading) -> Evaluation:
    """Predict every token of every text from those before it. Each text is a document of its own; none is empty.

    Raises:
        ConfigError: the reading does not fit the model, or covers no token.
    """
    longest, max_tokens = pretrained.max_seq_len, reading.max_tokens
    seq_len = reading.seq_len or longest
    stride = reading.stride or seq_len
    if seq_len > longest:
        raise ConfigError(f"--seq-len = {seq_len} is longer than the model's longest sequence, {longest}")
    if stride > seq_len:
        raise ConfigError(f"--stride = {stride} is larger than the windows, --seq-len = {seq_len}")
    nats, tokens, size = 0.0, 0, 0
    for text in texts:
        ids, characters = _first_tokens(pretrained, text, None if max_tokens is None else max_tokens - tokens)
        nats += _nats(pretrained, ids, seq_len, stride)
        tokens += len(ids)
        size += len(text[:characters].encode("utf-8"))
        if characters < len(text):
            break
    if not tokens:
        raise ConfigError(f"--max-tokens = {max_tokens} ends within a character, and no earlier token ends with one")
    return Evaluation(nats, tokens, size)


def _first_tokens(pretrained: Pretrained, text: str, limit: int | None) -> tuple[list[int], int]:
    """Return at most ``limit`` tokens of ``text``, and the number of characters that they are.

    A token may be a part of a character: the cut is where both a token and a character end.
    """
    ids = pretrained.encode(text)
    if limit is None or len(ids) <= limit:
        return ids, len(text)
    places = pretrained.places(text)
    for count in range(limit, max(0, limit - _BYTES_PER_CHARACTER), -1):
        end, next_begin = places[count - 1][1], places[count][0]
        if end <= next_begin:
            beginning = pretrained.decode(ids[:count])
            if text.startswith(beginning):
                return ids[:count], len(beginning)
            # The tokenizer normalizes: an accent that joined the character before has no place. Nor may a space have
            # one, with which the next token begins.
            return ids[:count], end + len(text[end:next_begin].rstrip())
    return [], 0


@torch.inference_mode()
def _nats(pretrained: Pretrained, ids: list[int], seq_len: int, stride: int) -> float:
    """Return the summed cross entropy of ``ids`` after the first token."""
    model, total = pretrained.model, 0.0
    tokens = torch.tensor([pretrained.first_token, *ids], device=model.device)
    for begin, end, scored in windows(len(ids), seq_len, stride):
        logits = model(tokens[None, begin:end], use_cache=False).logits[0, -scored:]
        total += F.cross_entropy(logits.float(), tokens[end + 1 - scored : end + 1], reduction="sum").item()
    return total
