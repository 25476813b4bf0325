"""Training text and its tokenizer, without TorchTitan: ``prepare(DataConfig(...))``."""

from mxtrain.data.config import DataConfig
from mxtrain.data.prepared import Prepared, prepare
from mxtrain.data.report import TextReport
from mxtrain.data.token_store import TokenFile

__all__ = ["DataConfig", "Prepared", "TextReport", "TokenFile", "prepare"]
