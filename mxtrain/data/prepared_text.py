"""A tokenizer and a tokenized text in one folder: ``prepared.json``, ``tokenizer/``, ``train.bin``, ``validation.bin``.

``prepared.json`` holds the report, and sizes and hashes of the other files, so that damage shows.
"""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from mxtrain.data.config import DataConfig
from mxtrain.data.text_report import TextReport
from mxtrain.data.token_store import TokenFile
from mxtrain.data.tokenizer import tokenizer_hash
from mxtrain.errors import ConfigError
from mxtrain.files import hash_file, reason
from mxtrain.json_toml import read_json

SUMMARY = "prepared.json"
TOKENIZER = "tokenizer"
SPLITS = ("train", "validation")


class DamagedText(Exception):
    """A folder does not hold what was written into it. The message says what is wrong, in a few words."""


@dataclass(frozen=True)
class Prepared:
    """A tokenizer and the tokenized text. Streamed datasets have no tokenized text."""

    tokenizer: Path
    """Folder with tokenizer.json and tokenizer_config.json"""

    tokenizer_sha256: str
    """See ``tokenizer_hash``"""

    train: TokenFile | None
    validation: TokenFile | None
    report: TextReport
    folder: Path | None
    """Folder in the cache; None if there is nothing to keep: an existing tokenizer and a streamed text"""

    @property
    def identity(self) -> dict[str, str]:
        """The hashes of everything that training reads. Equal identities are equal data."""
        identity = {"tokenizer": self.tokenizer_sha256}
        if self.train is not None:
            identity |= {split: getattr(self, split).sha256 for split in SPLITS} | {"dtype": self.train.dtype}
        return identity


def write_summary(
    folder: Path, config: DataConfig, tokenizer_sha256: str, files: dict[str, TokenFile], report: TextReport
) -> None:
    """Write ``prepared.json`` into a folder that holds everything else."""
    summary = {
        "report": asdict(report),
        "config": asdict(config),
        "tokenizer": {"path": config.tokenizer_path, "sha256": tokenizer_sha256},
        "tokens": {
            split: {"dtype": file.dtype, "count": file.count, "sha256": file.sha256} for split, file in files.items()
        },
    }
    (folder / SUMMARY).write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def load_text(folder: Path, tokenizer_path: str = "", *, reads_tokens: bool = False) -> Prepared:
    """Load a prepared text, after a check of the sizes and of the tokenizer's hash.

    Args:
        folder: the folder in the cache.
        tokenizer_path: folder of the tokenizer; "" for the one with which the text was tokenized.
        reads_tokens: also read the token files and compare their hashes.

    Raises:
        DamagedText: files are missing or damaged.
        ConfigError: the text was tokenized with another tokenizer than the one in ``tokenizer_path``.
    """
    report, files, tokenizer = _read_summary(folder)
    for file in files.values():
        size = file.path.stat().st_size if file.path.is_file() else 0
        if size != file.size or not file.path.is_file():
            raise DamagedText(f"{file.path.name} has {size:,} bytes instead of {file.size:,}")
    path = Path(tokenizer_path or tokenizer["path"] or folder / TOKENIZER)
    if tokenizer_hash(path) != tokenizer["sha256"]:
        if path == folder / TOKENIZER:
            raise DamagedText("its tokenizer is damaged")
        raise ConfigError(
            f"model.hf_assets_path = {str(path)!r} is not the tokenizer of the prepared text {folder.name!r}; give "
            f"the tokenizer of SHA-256 {tokenizer['sha256'][:12]} (runs keep theirs in their folder), or leave "
            "data.prepared empty"
        )
    if reads_tokens:
        for file in files.values():
            _check_tokens(file)
    return Prepared(path, tokenizer["sha256"], files.get("train"), files.get("validation"), report, folder)


def _check_tokens(file: TokenFile) -> None:
    try:
        digest = hash_file(file.path).sha256
    except OSError as error:
        raise DamagedText(f"{file.path.name} cannot be read: {reason(error)}") from error
    if digest != file.sha256:
        raise DamagedText(f"the contents of {file.path.name} have changed")


def _read_summary(folder: Path) -> tuple[TextReport, dict[str, TokenFile], dict]:
    try:
        summary = read_json(folder / SUMMARY)
        report = replace(TextReport(**summary["report"]), folder=str(folder))
        files = {split: TokenFile(folder / f"{split}.bin", **facts) for split, facts in summary["tokens"].items()}
        tokenizer = {key: str(summary["tokenizer"][key]) for key in ("path", "sha256")}
        for file in files.values():
            if (type(file.count), type(file.sha256)) != (int, str):
                raise TypeError("a token file has a whole number of tokens and a hash")
        sizes = [file.size for file in files.values()]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedText(f"{SUMMARY} is missing, damaged or of an earlier version") from error
    if len(sizes) != (0 if report.streamed else len(SPLITS)):
        raise DamagedText(f"{SUMMARY} is damaged")
    return report, files, tokenizer
