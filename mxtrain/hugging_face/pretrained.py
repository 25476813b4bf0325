"""Loads a model and its tokenizer from a folder in Hugging Face's format, through transformers."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from mxtrain.data.tokenizer import special_tokens
from mxtrain.errors import ConfigError

TOKENIZER_FILE = "tokenizer.json"
LOCAL = {"local_files_only": True, "trust_remote_code": False}


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

    def encode(self, text: str) -> list[int]:
        """Return the tokens of ``text``, without ``first_token``.

        As in training, the spelling of a special token in the text is plain text.
        """
        return self._tokenized(text)["input_ids"]

    def places(self, text: str) -> list[tuple[int, int]]:
        """Return where each token of ``text`` begins and ends, in characters.

        Tokens that are parts of one character have the place of this character. Some tokenizers leave out spaces at a
        token's ends.
        """
        return self._tokenized(text, return_offsets_mapping=True)["offset_mapping"]

    def _tokenized(self, text: str, **more):
        return self.tokenizer(text, add_special_tokens=False, split_special_tokens=True, verbose=False, **more)

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, clean_up_tokenization_spaces=False)


def require_transformers() -> None:
    """Raise ConfigError if transformers is not installed. Imports nothing."""
    if importlib.util.find_spec("transformers") is None:
        raise ConfigError('transformers is not installed, and this command needs it: pip install "mxtrain[hf]"')


def load(folder: Path) -> Pretrained:
    """Load the model in ``folder`` to the accelerator if there is one, in the dtype that its config.json names.

    Reads safetensors only, runs no code from the folder, and asks no server.

    Raises:
        ConfigError: transformers is not installed or cannot load the folder, weights are missing or have another
            shape, or the tokenizer has neither bos nor eos.
    """
    require_transformers()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    where = f"RUN = {str(folder)!r}"
    if not (folder / TOKENIZER_FILE).is_file():
        raise ConfigError(f"{where}: it has no tokenizer: {TOKENIZER_FILE} is missing")
    tokenizer = call(where, AutoTokenizer.from_pretrained, folder, **LOCAL)
    options = {"dtype": "auto", "use_safetensors": True, "output_loading_info": True, "ignore_mismatched_sizes": True}
    model, info = call(where, AutoModelForCausalLM.from_pretrained, folder, **options, **LOCAL)
    # transformers would draw these weights at random.
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(f"{where}: {len(missing)} of the model's weights are missing, such as {missing[0]}")
    if mismatched := sorted(info["mismatched_keys"]):
        name, saved, expected = mismatched[0]
        raise ConfigError(
            f"{where}: {len(mismatched)} of the model's weights have another shape than in config.json, such as {name} "
            f"with {list(saved)} instead of {list(expected)}"
        )
    tokens = special_tokens(folder, where)
    first_token = tokens["bos_token"] or tokens["eos_token"]
    if first_token is None:
        raise ConfigError(f"{where}: its tokenizer has neither a bos nor an eos token for a text to begin with")
    device = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else "cpu"
    return Pretrained(model.to(device).eval(), tokenizer, tokenizer.convert_tokens_to_ids(first_token))


def call(where: str, function: Callable, *arguments, **options):
    """Call a function of transformers. Raises ConfigError, beginning with ``where``, if it fails."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        return function(*arguments, **options)
    except Exception as error:  # transformers, safetensors and tokenizers raise classes of their own
        raise ConfigError(f"{where}: transformers cannot load it: {' '.join(str(error).split())[:300]}") from error
