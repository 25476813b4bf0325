"""Training text and its tokenizer, without TorchTitan: ``prepare(DataConfig(...))``."""

from mxtrain.data.config import DataConfig
from mxtrain.data.prepared import Prepared, prepare
from mxtrain.data.report import Report
from mxtrain.data.token_store import TokenFile

__all__ = ["DataConfig", "Prepared", "Report", "TokenFile", "prepare"]
