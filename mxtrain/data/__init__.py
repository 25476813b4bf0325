"""Prepares training text and its tokenizer: ``prepare(DataConfig(...))``. Does not need TorchTitan."""

from mxtrain.data.config import DataConfig
from mxtrain.data.prepared import prepare
from mxtrain.data.store import Prepared
from mxtrain.data.token_file import TokenFile

__all__ = ["DataConfig", "Prepared", "TokenFile", "prepare"]
