"""The settings of a training text and its tokenizer."""

import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.files import cache_folder

DATASETS = ("python", "files", "hf")

# A byte-level BPE starts from the 256 bytes and the two special tokens.
SMALLEST_VOCABULARY = 258
# ``tokenizers`` reserves memory for all tokens before it counts any. The largest published vocabularies have a million.
LARGEST_VOCABULARY = 1 << 24


@dataclass(frozen=True)
class DataConfig:
    """Decides which text is read, how it is split, and how it is tokenized.

    Fields without a line of their own are described in ``[data]`` of ``mxtrain.settings.sections``, which also checks
    types and ranges. Error messages use the names of the TOML settings: ``dataset`` and ``path`` are
    ``training.dataset`` and ``training.dataset_path``, ``tokenizer_path`` is ``model.hf_assets_path``.
    """

    dataset: str = "python"
    """One of DATASETS, or the name of a stream that ``prepare`` is given"""
    path: str = ""
    """"files": a file, folder or glob. "hf": the id of a Hugging Face dataset"""
    vocab_size: int = 2048
    """Size of the tokenizer to train; unused if tokenizer_path is set"""
    tokenizer_path: str = ""
    """Folder with a Hugging Face tokenizer; if empty, a tokenizer is trained on the training text"""
    unseparated: bool = False
    installed: bool = False
    max_bytes: int = 0
    validation_share: float = 0.01
    seed: int = 0
    text_key: str = "text"
    hf_config: str = ""
    cache_dir: str = ""
    prepared: str = ""
    stream_share: float = 0.0
    """"hf": share of the stream's documents held out for validation, from which no tokenizer is built; 0 for none"""
    section: str = field(default="training", compare=False)
    """TOML section of ``dataset`` and ``path``, for error messages"""

    def __post_init__(self):
        if not self.tokenizer_path and self.vocab_size < SMALLEST_VOCABULARY:
            raise ConfigError(
                f"data.vocab_size = {self.vocab_size} is too small: a byte-level BPE has at least "
                f"{SMALLEST_VOCABULARY} tokens (256 bytes and 2 special tokens)"
            )
        if self.max_bytes and self.dataset not in ("python", "files"):
            raise ConfigError(
                f"data.max_bytes = {self.max_bytes} does not apply to {self.section}.dataset = {self.dataset!r}, "
                "which is streamed; set it to 0, because the training steps limit how much is read"
            )

    def identity(self) -> dict:
        """Return the fields that decide the result, for the cache key, which has a hash of the tokenizer, too."""
        omitted = {"cache_dir", "prepared", "section", "unseparated", "tokenizer_path"}
        return {name: value for name, value in asdict(self).items() if name not in omitted}

    def cache_path(self) -> Path:
        return (Path(os.path.expanduser(self.cache_dir)) if self.cache_dir else cache_folder()).absolute()


def config_of(job_config, model_vocab_size: int) -> DataConfig:
    """Return the settings of a job's training text. Its model has ``model_vocab_size`` tokens."""
    tokenizer, data = job_config.model.hf_assets_path, job_config.data
    own = {
        "dataset": job_config.training.dataset,
        "path": path_of(job_config, "training", job_config.training.dataset),
        # An existing tokenizer has its own size; 0 keeps the model's size out of the cache key.
        "vocab_size": 0 if tokenizer else model_vocab_size,
        "tokenizer_path": str(Path(os.path.expanduser(tokenizer)).absolute()) if tokenizer else "",
        "hf_config": data.hf_config or "",
        "stream_share": held_out_share(job_config),
    }
    config = DataConfig(**asdict(data) | own)
    return replace(config, cache_dir=str(config.cache_path()))  # resolved now: the environment may change


def path_of(job_config, section: str, dataset: str) -> str:
    """Return ``dataset_path`` in "training" or "validation"."""
    path = getattr(job_config, section).dataset_path or ""
    if path and dataset == "python":
        raise ConfigError(
            f"{section}.dataset_path = {path!r} does not apply to {section}.dataset = 'python', which reads this "
            f"machine's standard library; to read files of your own, set {section}.dataset = 'files'"
        )
    return path


def held_out_share(job_config) -> float:
    """Return the share of the training stream's documents that validation holds out; 0 if it reads another text."""
    return job_config.data.validation_share if job_config.validation.enable and shares_stream(job_config) else 0.0


def shares_stream(job_config) -> bool:
    """Return whether validation, where it is enabled, reads the stream that training reads."""
    training, validation = job_config.training, job_config.validation
    is_same = not validation.dataset and validation.dataset_path in (None, "", training.dataset_path)
    return training.dataset == "hf" and is_same
