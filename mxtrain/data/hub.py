"""Streams Hugging Face datasets as training text, without downloading them whole."""

from collections.abc import Iterator

from mxtrain.data.local_files import text_of
from mxtrain.errors import ConfigError


def open_stream(path: str, hf_config: str = "", split: str = "train", section: str = "training"):
    """Open the Hugging Face dataset ``path`` as a ``datasets.IterableDataset``.

    Args:
        path: the dataset's id, for example "allenai/c4".
        hf_config: the dataset's configuration, for example "en"; "" means its default.
        split: "train" or "validation".
        section: TOML section of ``path``, for error messages.

    Raises:
        ConfigError: ``path`` is empty, or the dataset, configuration or split cannot be opened.
    """
    import datasets

    if not path:
        raise ConfigError(
            f"{section}.dataset = 'hf' needs {section}.dataset_path: the id of a Hugging Face dataset, "
            "for example 'allenai/c4' (with data.hf_config = 'en')"
        )
    try:
        return datasets.load_dataset(path, name=hf_config or None, split=split, streaming=True)
    except Exception as error:  # the hub, its client and dataset scripts raise many types
        raise ConfigError(
            f"{section}.dataset_path = {path!r} (data.hf_config = {hf_config!r}, split {split!r}) cannot be opened "
            f"as a Hugging Face dataset: {type(error).__name__}: {error}"
        ) from error


def stream_texts(stream, text_key: str, path: str) -> Iterator[str]:
    """Yield the text of every row. Raises ConfigError unless the column ``text_key`` holds strings."""
    for row in stream:
        yield text_of(row, text_key, path)
