"""Trains byte-level BPE tokenizers, and loads tokenizers stored in Hugging Face's format."""

import json
import os
from collections.abc import Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mxtrain.data.progress import Progress, megabytes, one_line
from mxtrain.errors import ConfigError
from mxtrain.files import replace_file
from mxtrain.json_toml import read_json

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"

# Upper limit on the text for training. The standard library (31 MB) is enough for a vocabulary of 128,256; more
# text takes time (about 0.2 s/MB on 2 cores) and hardly changes the merges.
SAMPLE_BYTES = 64_000_000

# Llama 3's pre-tokenization (GPT-4's differs only in the length of digit runs). Unlike GPT-2's, it splits an
# indentation from the line break before it, so that each depth of indentation in Python text becomes one token.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


FILES = ("tokenizer.json", "tokenizer_config.json")
"""The files that decide how text is tokenized"""
COMPANIONS = ("chat_template.jinja", "generation_config.json")
"""Files beside those of an imported model, for its export"""


class LoadedTokenizer(NamedTuple):
    encoder: object
    """A ``tokenizers.Tokenizer`` that encodes the spelling of a special token as plain text"""

    bos_id: int | None
    eos_id: int | None
    size: int
    """The largest id plus one"""


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path, progress: Progress) -> None:
    """Train a byte-level BPE on the first SAMPLE_BYTES of ``texts`` and save it in ``folder``.

    Ids 0 and 1 are the begin-of-text and end-of-text tokens. The vocabulary has ``vocab_size`` tokens, or fewer if
    the text has no more pairs to merge. The same texts give the same tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    _set_parallelism()
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    progress.say(f"training a byte-level BPE tokenizer of {vocab_size:,} tokens")
    tokenizer.train_from_iterator(_sample(texts, progress), trainer)
    folder.mkdir(parents=True)
    # Not ``tokenizer.save``: its error is not an OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _sample(texts: Iterable[str], progress: Progress) -> Iterator[str]:
    total = 0
    for text in texts:
        total += len(text.encode("utf-8"))
        if total > SAMPLE_BYTES:
            break
        yield text
        progress.tick(lambda: f"read {megabytes(total)} of text for the tokenizer")  # noqa: B023
    progress.say(f"merging pairs of {megabytes(min(total, SAMPLE_BYTES))} of text")


def require_tokenizer(folder: Path) -> Path:
    """Return the path of ``tokenizer.json`` in ``folder``. Raises ConfigError if the file is missing or unreadable."""
    file = folder / "tokenizer.json"
    if not (file.is_file() and os.access(file, os.R_OK)):
        problem = "holds no tokenizer.json that can be read" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"model.hf_assets_path = {str(folder)!r} {problem}; give a folder with a Hugging Face tokenizer, "
            "or leave it empty to train a tokenizer"
        )
    return file


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Load ``tokenizer.json`` from ``folder``; ``tokenizer_config.json`` names its bos and eos tokens.

    Raises:
        ConfigError: ``tokenizer.json`` is missing, unreadable or empty, or does not contain the bos or eos token; or
            ``tokenizer_config.json`` is damaged.
    """
    from tokenizers import Tokenizer

    _set_parallelism()
    setting = f"model.hf_assets_path = {str(folder)!r}"
    file = require_tokenizer(folder)
    try:
        encoder = Tokenizer.from_file(str(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{setting}: tokenizer.json cannot be read: {one_line(error)}") from error
    encoder.encode_special_tokens = True
    config = _tokenizer_config(folder, setting)
    ids = {}
    for name in ("bos_token", "eos_token"):
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if not isinstance(token, str | None):
            raise ConfigError(f"{setting}: tokenizer_config.json names {name} {token!r}, which is not text")
        ids[name] = None if token is None else encoder.token_to_id(token)
        if token is not None and ids[name] is None:
            raise ConfigError(f"{setting}: tokenizer_config.json names {name} {token!r}, absent from tokenizer.json")
    size = 1 + max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    if not size:
        raise ConfigError(f"{setting}: tokenizer.json has no tokens")
    return LoadedTokenizer(encoder, ids["bos_token"], ids["eos_token"], size)


def _tokenizer_config(folder: Path, setting: str) -> dict:
    file = folder / "tokenizer_config.json"
    return read_json(file, f"{setting}: {file.name}") if file.is_file() else {}


def copy_tokenizer(source: Path, target: Path) -> None:
    """Make the folder ``target`` hold the tokenizer of ``source``, which may also hold the weights of a model."""
    if tokenizer_hash(source) == tokenizer_hash(target):
        return
    target.mkdir(exist_ok=True)
    for name in (*FILES, *COMPANIONS):
        if (source / name).is_file():
            replace_file(target / name, (source / name).read_bytes())
        else:
            (target / name).unlink(missing_ok=True)


def tokenizer_hash(folder: Path) -> str:
    """Hash FILES in a folder. A missing file counts as empty."""
    digest = sha256()
    for name in FILES:
        file = folder / name
        digest.update(sha256(file.read_bytes() if file.is_file() else b"").digest())
    return digest.hexdigest()


def _set_parallelism() -> None:
    # If this is unset, every later fork (data loader workers, compilers) prints a warning about parallelism.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")
