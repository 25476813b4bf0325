"""The formats of ``mxtrain export``."""

from functools import partial

from mxtrain.hugging_face.block_layouts import MXFP8_LAYOUT, NVFP4_LAYOUT
from mxtrain.hugging_face.formats import HighPrecision
from mxtrain.hugging_face.quantized import Quantized

FORMATS = {"hf": HighPrecision} | {layout.name: partial(Quantized, layout) for layout in (MXFP8_LAYOUT, NVFP4_LAYOUT)}
"""Name on the command line -> a function that makes the ``Format`` of a run, from its RunFacts and the dtype of all
tensors in high precision (None takes the format's own)"""
