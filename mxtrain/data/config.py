"""The settings of a training text and its tokenizer."""

import os
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

from mxtrain.cache import cache_folder
from mxtrain.errors import ConfigError

DATASETS = ("python", "files", "hf")

# A byte-level BPE starts from the 256 bytes and the two special tokens.
SMALLEST_VOCABULARY = 258
# ``tokenizers`` reserves memory for all tokens before it counts any. The largest published vocabularies have a million.
LARGEST_VOCABULARY = 1 << 24

TYPES = {str: "a string", bool: "true or false", int: "a whole number", float: "a number"}
"""Types of the fields, in words"""


@dataclass(frozen=True)
class DataConfig:
    """Decides which text is read, how it is split, and how it is tokenized.

    Error messages use the names of the TOML settings: ``dataset`` and ``path`` are ``training.dataset`` and
    ``training.dataset_path``, ``tokenizer_path`` is ``model.hf_assets_path``, and the rest are in ``[data]``.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    dataset: str = "python"
    """One of DATASETS"""

    path: str = ""
    """"files": a file, folder or glob. "hf": the id of a Hugging Face dataset"""

    vocab_size: int = 2048
    """Size of the tokenizer to train; unused if tokenizer_path is set"""

    tokenizer_path: str = ""
    """Folder with a Hugging Face tokenizer; if empty, a tokenizer is trained on the training text"""

    unseparated: bool = False
    """Take a tokenizer that has neither a bos nor an eos token: nothing separates documents"""

    installed: bool = False
    """"python": add every installed package to the standard library"""

    other_files: bool = False
    """"python": add C, C++ and CUDA source, type stubs and documentation, and the system's headers and manual pages"""

    max_bytes: int = 0
    """Upper limit on the text, in bytes of UTF-8; 0 means no limit"""

    package_share: float = 0.2
    """"python": the largest share of the text that one installed package may supply, in (0, 1]"""

    validation_share: float = 0.01
    """Share of the documents held out for validation, in [0, 1)"""

    seed: int = 0
    """Seed of the order of the files"""

    text_key: str = "text"
    """The text column of JSONL, Parquet and Hugging Face datasets"""

    hf_config: str = ""
    """"hf": the dataset's configuration, for example "en" for allenai/c4"""

    cache_dir: str = ""
    """Folder for the results; empty means $MXTRAIN_CACHE, else ~/.cache/mxtrain"""

    stream_share: float = 0.0
    """"hf": share of the stream's documents held out for validation, from which no tokenizer is built; 0 for none"""

    prepared: str = ""
    """Name or path of a prepared text in the cache, which is used without reading any source; "" for none"""

    section: str = field(default="training", compare=False)
    """TOML section of ``dataset`` and ``path``, for error messages"""

    def __post_init__(self):
        for f in fields(self):
            value = getattr(self, f.name)
            if type(value) is not f.type and not (f.type is float and type(value) is int):
                raise ConfigError(f"{self.setting(f.name)} = {value!r} is not {TYPES[f.type]}")
        if self.vocab_size > LARGEST_VOCABULARY:
            raise ConfigError(f"data.vocab_size = {self.vocab_size} is too large: at most {LARGEST_VOCABULARY} tokens")
        if not self.tokenizer_path and self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size = {self.vocab_size} is too small: a byte-level BPE has at least "
                f"{SMALLEST_VOCABULARY} tokens (256 bytes and 2 special tokens)"
            )
        if not 0 < self.package_share <= 1:
            raise ConfigError(f"data.package_share = {self.package_share} is not in (0, 1]")
        if not 0 <= self.validation_share < 1:
            raise ConfigError(f"data.validation_share = {self.validation_share} is not in [0, 1)")
        for name in ("max_bytes", "seed"):
            if getattr(self, name) < 0:
                raise ConfigError(f"data.{name} = {getattr(self, name)} is negative")
        if self.max_bytes and self.dataset not in ("python", "files"):
            raise ConfigError(
                f"data.max_bytes = {self.max_bytes} does not apply to {self.section}.dataset = {self.dataset!r}, "
                "which is streamed: set it to 0; the number of training steps limits how much is read"
            )

    def setting(self, field_name: str) -> str:
        """Return the full name of the TOML setting of a field, for error messages."""
        special = {
            "dataset": f"{self.section}.dataset",
            "path": f"{self.section}.dataset_path",
            "tokenizer_path": "model.hf_assets_path",
        }
        return special.get(field_name, f"data.{field_name}")

    def identity(self) -> dict:
        """Return the fields that decide the result, for the cache key."""
        fields = asdict(self)
        for name in ("cache_dir", "prepared", "section", "unseparated", "tokenizer_path"):
            del fields[name]  # the key hashes the tokenizer itself
        if not self.stream_share:
            del fields["stream_share"]  # the text of a config from before this field has the same key as then
        if not self.other_files:
            del fields["other_files"]  # likewise
        return fields

    def cache_path(self) -> Path:
        """Return the path of the cache folder."""
        return (Path(os.path.expanduser(self.cache_dir)) if self.cache_dir else cache_folder()).absolute()

    def cache_root(self) -> Path:
        """Return the cache folder, and create it if needed. Raises ConfigError if that fails."""
        root = self.cache_path()
        try:
            root.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"data.cache_dir = {self.cache_dir!r}: cannot create {str(root)!r} ({error.strerror}); "
                "set data.cache_dir or $MXTRAIN_CACHE to a writable folder"
            ) from error
        return root
