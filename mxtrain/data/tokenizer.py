"""Trains byte-level BPE tokenizers, and loads tokenizers stored in Hugging Face's format."""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from typing import NamedTuple

from mxtrain.errors import ConfigError, one_line
from mxtrain.files import read_json, replace_file

# If this is unset, every fork after a use of tokenizers (loader workers, compilers) prints a warning about parallelism.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

BOS_TOKEN = "<|begin_of_text|>"
EOS_TOKEN = "<|end_of_text|>"

# The standard library (31 MB) is enough for a vocabulary of 128,256; more text takes time (about 0.2 s/MB on 2 cores)
# and hardly changes the merges.
SAMPLE_BYTES = 64_000_000

# Llama 3's pre-tokenization. Unlike GPT-2's, it splits an indentation from the line break before it, so that each depth
# of indentation in Python text becomes one token.
SPLIT_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Training takes quadratic time in the length of a run of letters, such as DNA: it sees longer runs in parts. The saved
# tokenizer encodes runs whole, in linear time.
LONGEST_RUN = 256
TRAINING_PATTERN = SPLIT_PATTERN.replace("+", f"{{1,{LONGEST_RUN}}}").replace("*", f"{{0,{LONGEST_RUN}}}")

FILES = ("tokenizer.json", "tokenizer_config.json")
"""The files that decide how text is tokenized"""
COMPANIONS = ("chat_template.jinja", "generation_config.json")
"""Files beside those of an imported model, for its export"""

SPECIAL_TOKENS_FILE = "special_tokens_map.json"
SPECIAL_TOKENS = ("bos_token", "eos_token")
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
"""Classes of transformers without special tokens of their own"""


class LoadedTokenizer(NamedTuple):
    encoder: object
    """A ``tokenizers.Tokenizer`` that encodes the spelling of a special token as plain text"""

    bos_id: int | None
    eos_id: int | None
    size: int
    """The largest id plus one"""

    @property
    def separators(self) -> str:
        """Which tokens separate documents, in words; "" if none do."""
        ids = {"begins": self.bos_id, "ends": self.eos_id}
        return " and ".join(f"{verb} with {self.encoder.id_to_token(i)!r}" for verb, i in ids.items() if i is not None)


def train_tokenizer(texts: Iterable[str], vocab_size: int, folder: Path, progress: Callable[[str], None]) -> None:
    """Train a byte-level BPE on the first SAMPLE_BYTES of ``texts`` and save it in ``folder``.

    Ids 0 and 1 are the begin-of-text and end-of-text tokens. The vocabulary has ``vocab_size`` tokens, or fewer if
    the text has no more pairs to merge. The same texts give the same tokenizer.
    """
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    def pre_tokenizer(pattern: str):
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), byte_level])

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer(TRAINING_PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    progress(f"training a byte-level BPE tokenizer of {vocab_size:,} tokens")
    tokenizer.train_from_iterator(_sample(texts, progress), trainer)
    tokenizer.pre_tokenizer = pre_tokenizer(SPLIT_PATTERN)
    folder.mkdir(parents=True)
    # Not ``tokenizer.save``: its error is not an OSError.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": BOS_TOKEN, "eos_token": EOS_TOKEN}
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


def _sample(texts: Iterable[str], progress: Callable[[str], None]) -> Iterator[str]:
    total = 0
    for text in texts:
        if total == SAMPLE_BYTES:
            break
        part = text.encode("utf-8")[: SAMPLE_BYTES - total]
        total += len(part)
        yield part.decode("utf-8", errors="ignore")  # without half of a character
    progress(f"merging pairs of {total / 1e6:,.1f} MB of text")


def load_tokenizer(folder: Path) -> LoadedTokenizer:
    """Load ``tokenizer.json`` from ``folder``, with the bos and eos tokens of ``special_tokens``.

    The file's truncation, padding and added tokens are left out, as transformers does unless a call asks for them.
    """
    from tokenizers import Tokenizer, processors

    setting = f"model.hf_assets_path = {str(folder)!r}"
    if not (folder / FILES[0]).is_file():
        problem = "holds no tokenizer.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"{setting} {problem}; name the folder of a Hugging Face tokenizer, or leave it empty to build one"
        )
    try:
        encoder = Tokenizer.from_file(str(folder / FILES[0]))
    except Exception as error:  # tokenizers raises plain Exception
        raise ConfigError(f"{setting}: tokenizer.json cannot be read: {one_line(error)}") from error
    encoder.encode_special_tokens = True
    encoder.no_truncation()
    encoder.no_padding()
    encoder.post_processor = processors.Sequence([])
    ids = {}
    for name, token in special_tokens(folder, setting).items():
        ids[name] = encoder.token_to_id(token) if isinstance(token, str) else None
        if token is not None and ids[name] is None:
            raise ConfigError(f"{setting}: {name} = {token!r} is not in tokenizer.json; correct {FILES[1]}")
    size = 1 + max(encoder.get_vocab(with_added_tokens=True).values(), default=-1)
    return LoadedTokenizer(encoder, ids["bos_token"], ids["eos_token"], size)


def special_tokens(folder: Path, setting: str) -> dict[str, str | None]:
    """Return ``bos_token`` and ``eos_token`` of a tokenizer as transformers finds them; None for a missing token.

    They stand in ``tokenizer_config.json`` or in ``special_tokens_map.json``; or they follow from the tokenizer's class
    as GPT-2's do, which takes transformers. ``setting`` begins error messages.
    """
    said, more, model = (_read(folder / name, setting) for name in (FILES[1], SPECIAL_TOKENS_FILE, "config.json"))
    has_class = "tokenizer_class" in said or model.keys() & {"tokenizer_class", "model_type"}
    # transformers reads the map second, but not beside ``added_tokens_decoder``.
    said = more | said if "added_tokens_decoder" in said else said | more
    if has_class and said.get("tokenizer_class") not in PLAIN_CLASSES and not said.keys() >= set(SPECIAL_TOKENS):
        said = _tokens_of_class(folder, setting) | said
    return _named(said)


def _read(file: Path, setting: str) -> dict:
    return read_json(file, f"{setting}: {file.name}") if file.is_file() else {}


def _named(said: dict) -> dict[str, str | None]:
    """Return the special tokens that the contents of a file name, as text or as an object with text."""
    tokens = {name: said.get(name) for name in SPECIAL_TOKENS}
    return {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}


def _tokens_of_class(folder: Path, setting: str) -> dict[str, str]:
    from tokenizers import Tokenizer

    try:
        from transformers import AutoTokenizer

        loaded = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # it is not installed, or raises many types
        raise ConfigError(
            f"{setting}: transformers must find its bos and eos tokens, and failed ({one_line(error)[:200]}); "
            f'pip install "mxtrain[hf]", or name both in {FILES[1]}, with null for a missing token'
        ) from error
    vocabulary = Tokenizer.from_file(str(folder / FILES[0]))
    tokens = {name: getattr(loaded, name) for name in SPECIAL_TOKENS}
    return {name: token for name, token in tokens.items() if token and vocabulary.token_to_id(token) is not None}


def copy_tokenizer(source: Path, target: Path) -> None:
    """Make the folder ``target`` hold the tokenizer of ``source``, which may also hold the weights of a model.

    Its ``special_tokens_map.json`` has the bos and eos tokens that ``tokenizer_config.json`` does not name, and the
    source's others.
    """
    setting = f"model.hf_assets_path = {str(source)!r}"
    tokens = special_tokens(source, setting)
    if tokenizer_hash(source) == tokenizer_hash(target) and special_tokens(target, setting) == tokens:
        return
    names = (*FILES, *COMPANIONS)
    files = {name: (source / name).read_bytes() if (source / name).is_file() else None for name in names}
    is_named = tokens == _named(_read(source / FILES[1], setting))
    others = _read(source / SPECIAL_TOKENS_FILE, setting)
    files[SPECIAL_TOKENS_FILE] = json.dumps(others | tokens).encode() if others or not is_named else None
    target.mkdir(exist_ok=True)
    for name, content in files.items():
        if content is None:
            (target / name).unlink(missing_ok=True)
        else:
            replace_file(target / name, content)


def tokenizer_hash(folder: Path) -> str:
    """Hash FILES in a folder. A missing file counts as empty. Special tokens elsewhere show in the tokenized text."""
    digest = sha256()
    for name in FILES:
        file = folder / name
        digest.update(sha256(file.read_bytes() if file.is_file() else b"").digest())
    return digest.hexdigest()
