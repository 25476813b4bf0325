"""Prepares training text and its tokenizer: ``prepare(DataConfig(...))``. Does not need TorchTitan."""

from mxtrain.data.config import DataConfig
from mxtrain.data.prepared import prepare
from mxtrain.data.prepared_text import Prepared
from mxtrain.data.token_store import TokenFile

__all__ = ["DataConfig", "Prepared", "TokenFile", "prepare"]
