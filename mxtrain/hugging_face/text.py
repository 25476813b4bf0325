"""``mxtrain generate`` and ``eval``: a model's text, and its loss on text, through transformers."""

import importlib.util
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from mxtrain.data.tokenizer import load_tokenizer, special_tokens
from mxtrain.errors import ConfigError
from mxtrain.formats.format import FORMATS

TOKENIZER_FILE = "tokenizer.json"
DEFAULT_NEW_TOKENS = 100
AS_TRAINING = {"add_special_tokens": False, "split_special_tokens": True}
"""How training encodes text: the spelling of a special token is plain text"""
SAMPLE = "I'LL don't, 'naïve' 1234567 + 8.9;  \r\n\n\tf(a_b):\n        x \u3000数学 \ufb01 \U0001f600 e\u0301\u00a0 "
"""What tokenizers treat differently: contractions, digits, spaces, line breaks, characters with several forms"""


@dataclass(frozen=True)
class Pretrained:
    """A causal language model, ready to run, and its tokenizer."""

    model: torch.nn.Module
    """``transformers.PreTrainedModel`` in evaluation mode"""
    tokenizer: object
    """``transformers.PreTrainedTokenizerBase``"""
    first_token: int
    """Every text begins with this token, as documents in training do: bos. Without a bos token it is eos, which in
    training stands before the next document."""

    @property
    def max_seq_len(self) -> int:
        """The longest sequence that the model's configuration allows."""
        return self.model.config.max_position_embeddings

    def encode(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """Return the tokens of ``text`` without ``first_token``, and where each begins and ends, in characters.

        Tokens that are parts of one character have the place of this character.
        """
        encoded = self.tokenizer(text, verbose=False, return_offsets_mapping=True, **AS_TRAINING)
        return encoded["input_ids"], encoded["offset_mapping"]


def require_transformers() -> None:
    """Raise ConfigError if transformers is not installed. Imports nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError('transformers is not installed, and this command needs it: pip install "mxtrain[hf]"')


@contextmanager
def in_one_line(problem: str) -> Iterator[None]:
    """Raise any exception as a ConfigError: transformers, safetensors and tokenizers have classes of their own."""
    try:
        yield
    except Exception as error:
        raise ConfigError(f"{problem}: {' '.join(str(error).split())[:300]}") from error


def from_pretrained(kind: str, folder: Path, where: str, **options):
    """Load ``folder`` with a class of transformers, such as "AutoConfig". Runs no code from it, and asks no server.

    Raises:
        ConfigError: transformers is not installed or cannot load the folder. The message begins with ``where``.
    """
    require_transformers()
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with in_one_line(f"{where}: transformers cannot load it"):
        load = getattr(transformers, kind).from_pretrained
        return load(folder, local_files_only=True, trust_remote_code=False, **options)


def require_same_tokens(trained: Path, exported: Path, where: str) -> list[str]:
    """Raise ConfigError if readers of ``exported`` cut a sample into other tokens than the tokenizer in ``trained``.

    Returns a line for the user if transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return ["transformers is not installed: its tokens were not compared with training's"]
    expected = load_tokenizer(trained).encoder.encode(SAMPLE).ids
    if from_pretrained("AutoTokenizer", exported, where)(SAMPLE, **AS_TRAINING)["input_ids"] != expected:
        raise ConfigError(f"{where}: transformers cuts a sample into other tokens than training does")
    return []


def load(folder: Path) -> Pretrained:
    """Load the model in ``folder`` to the accelerator if there is one, in the dtype that its config.json names.

    Of its generation_config.json only the eos tokens count.

    Raises:
        ConfigError: as ``from_pretrained``; it has experts in a block format; weights are missing or have another shape
            than in config.json; or the tokenizer has neither bos nor eos.
    """
    where = f"RUN = {str(folder)!r}"
    config = from_pretrained("AutoConfig", folder, where)
    stored = (getattr(config, "quantization_config", None) or {}).get("format")
    if hasattr(config, "num_experts_per_tok") and stored in {
        fmt.layout.compression for fmt in FORMATS.values() if fmt.layout
    }:
        raise ConfigError(
            f"{where}: transformers cannot read experts in {stored!r}; give the run, or an export with --format hf"
        )
    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(f"{where}: it has no tokenizer: {TOKENIZER_FILE} is missing")
    # AutoTokenizer may take the model's own class, which replaces parts of tokenizer.json.
    tokenizer = from_pretrained("PreTrainedTokenizerFast", folder, where)
    options = {"dtype": "auto", "use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = from_pretrained("AutoModelForCausalLM", folder, where, **options)
    # transformers would draw these weights at random.
    if absent := sorted({*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])}):
        raise ConfigError(
            f"{where}: {len(absent)} of the model's weights are missing or have another shape than in config.json, "
            f"such as {absent[0]}"
        )
    # The command line says how tokens are chosen.
    model.generation_config = type(model.generation_config)(eos_token_id=model.generation_config.eos_token_id)
    tokens = special_tokens(folder, where)
    first_token = tokens["bos_token"] or tokens["eos_token"]
    if first_token is None:
        raise ConfigError(f"{where}: its tokenizer has neither a bos nor an eos token for a text to begin with")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    model = model.to(device).eval()
    with in_one_line(f"{where}: transformers cannot run it"), torch.inference_mode():
        model(torch.zeros(1, 1, dtype=torch.long, device=device))
    return Pretrained(model, tokenizer, tokenizer.convert_tokens_to_ids(first_token))


@torch.inference_mode()
def generate(
    pretrained: Pretrained, prompt: str, max_new_tokens: int | None = None, seed: int | None = None, **sampling
) -> None:
    """Print ``prompt`` and its continuation to stdout, each word as soon as it is there.

    Args:
        prompt: "" gives a text from its beginning.
        max_new_tokens: number of tokens to add at most; the text ends earlier at an eos token. None stands for
            DEFAULT_NEW_TOKENS, or fewer if the model's longest sequence holds no more.
        seed: the same seed gives the same text on the same machine; None draws a new one.
        sampling: arguments of transformers' ``generate``.

    Raises:
        ConfigError: prompt and new tokens are longer than the model's longest sequence.
    """
    from transformers import TextStreamer

    ids = [pretrained.first_token, *pretrained.encode(prompt)[0]]
    longest, room = pretrained.max_seq_len, pretrained.max_seq_len - len(ids)
    if room < 1:
        raise ConfigError(
            f"TEXT has {len(ids)} tokens, bos included, and the model's longest sequence has {longest}: shorten it"
        )
    new_tokens = max_new_tokens or min(DEFAULT_NEW_TOKENS, room)
    if new_tokens > room:
        raise ConfigError(
            f"--max-new-tokens = {new_tokens} after a prompt of {len(ids)} tokens exceeds the model's longest "
            f"sequence, {longest}: at most {room} fit"
        )
    torch.seed() if seed is None else torch.manual_seed(seed)
    inputs = torch.tensor([ids], device=pretrained.model.device)
    pretrained.model.generate(
        inputs,
        attention_mask=torch.ones_like(inputs),
        max_new_tokens=new_tokens,
        pad_token_id=pretrained.tokenizer.eos_token_id,
        streamer=TextStreamer(pretrained.tokenizer, skip_special_tokens=True, clean_up_tokenization_spaces=False),
        **sampling,
    )


@dataclass(frozen=True)
class Evaluation:
    nats: float
    """Cross entropy of all tokens, summed"""
    tokens: int
    """Number of tokens that were predicted: those of the text. The first token (bos) is given, and no eos is added."""
    bytes: int
    """Bytes of the text in UTF-8"""

    def __str__(self) -> str:
        loss = self.nats / self.tokens
        perplexity = math.exp(loss) if loss < 709 else math.inf
        return (
            f"loss        {loss:.4f} nats per token\n"
            f"perplexity  {perplexity:,.4f} per token\n"
            f"bits/byte   {self.nats / math.log(2) / self.bytes:.4f}\n"
            f"tokens      {self.tokens:,}\n"
            f"bytes       {self.bytes:,}"
        )


def evaluate(
    pretrained: Pretrained,
    texts: Iterable[str],
    seq_len: int | None = None,
    stride: int | None = None,
    max_tokens: int | None = None,
) -> Evaluation:
    """Predict every token of every text from those before it. Each text is a document of its own; none is empty.

    Args:
        seq_len: tokens of an input at most; None takes the model's longest sequence.
        stride: tokens that each window after the first predicts (see ``windows``); None takes ``seq_len``.
        max_tokens: stop after this many tokens, or a few earlier, where a character ends; None reads all.

    Raises:
        ConfigError: a number does not fit the model, or no token is read.
    """
    longest = pretrained.max_seq_len
    seq_len = seq_len or longest
    stride = stride or seq_len
    if seq_len > longest:
        raise ConfigError(f"--seq-len = {seq_len} is longer than the model's longest sequence, {longest}")
    if stride > seq_len:
        raise ConfigError(f"--stride = {stride} is larger than the windows, --seq-len = {seq_len}")
    nats, tokens, size = 0.0, 0, 0
    for text in texts:
        ids, places = pretrained.encode(text)
        room = len(ids) if max_tokens is None else max_tokens - tokens
        is_cut = room < len(ids)
        if is_cut:  # a token may be a part of a character: cut where both a token and a character end
            text = text[: min(places[room - 1][1], places[room][0])] if room else ""
            ids, _ = pretrained.encode(text)
        nats += _nats(pretrained, ids, seq_len, stride)
        tokens += len(ids)
        size += len(text.encode("utf-8"))
        if is_cut:
            break
    if not tokens:
        raise ConfigError(f"--max-tokens = {max_tokens} ends within a character, and no earlier token ends with one")
    return Evaluation(nats, tokens, size)


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


@torch.inference_mode()
def _nats(pretrained: Pretrained, ids: list[int], seq_len: int, stride: int) -> float:
    """Return the summed cross entropy of ``ids`` after the first token."""
    model, total = pretrained.model, 0.0
    tokens = torch.tensor([pretrained.first_token, *ids], device=model.device)
    for begin, end, scored in windows(len(ids), seq_len, stride):
        logits = model(tokens[None, begin:end], use_cache=False).logits[0, -scored:]
        total += F.cross_entropy(logits.float(), tokens[end + 1 - scored : end + 1], reduction="sum").item()
    return total
