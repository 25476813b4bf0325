"""Prepares training text and its tokenizer: ``prepare(DataConfig(...))``. Does not need TorchTitan."""

from mxtrain.data.config import DataConfig
from mxtrain.data.prepared import Prepared, prepare
from mxtrain.data.token_files import Tokens

__all__ = ["DataConfig", "Prepared", "Tokens", "prepare"]
