"""The releases of TorchTitan that mxtrain runs: a folder of files for each, behind one interface.

A new release is a row of ``mxtrain.settings.releases.RELEASES`` and a folder whose ``engine.py`` is an ``Engine``. To
drop a release, delete both.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from mxtrain.settings.fields import Problems, Settings
from mxtrain.settings.releases import lacks, release_name

RELEASE = release_name()


class Engine(Protocol):
    """What mxtrain uses of a release. A job stands for ``Settings.values``, or TorchTitan 0.2.2's job config."""

    Trainer: type
    """``TrainingRun`` over TorchTitan's trainer"""
    SizedModel: type
    """
    A model with causal attention and without data, as export and import see it. ``of_flavor`` takes settings of
    ``[model_args]``, the number of positions, and a vocabulary unless it is 0. ``sizes`` have their names in
    ``[model_args]``, "vocab_size", "seq_len" and, only with experts, "num_experts". ``on_meta`` builds the model
    without converters, fp32. ``adapter`` is TorchTitan's, for one parameter at a time
    """
    with_mxtrain: Callable
    """Adds mxtrain to the spec of a user's own model"""

    register: Callable[[], None]
    """Makes mxtrain known to TorchTitan, once, when ``mxtrain.titan`` is imported"""
    models: Callable[[], Iterable[str]]
    """The names of all models that somebody has registered"""
    converters: Callable[[], Iterable[str]]
    """The names of all converters that somebody has registered"""
    sizes_of: Callable[[Any], dict[str, Any]]
    """(job) -> the sizes of its model by their names in ``[model_args]``, "vocab_size" and "seq_len"."""
    layout_problems: Callable[[Settings], Problems]
    """Degrees of parallelism that the release does not have for a model"""
    build_on_meta: Callable[[Any], nn.Module]
    """(job) -> its model as TorchTitan builds it before converters, on the meta device"""
    convertible: Callable[[nn.Module], AbstractContextManager]
    """Context in which converters know the modules of a model, under the names of TorchTitan 0.2.2"""
    example_inputs: Callable[[nn.Module], tuple]
    """Arguments for one forward pass of a language model without data"""
    saved_name: Callable[[str], str]
    """The name in checkpoints of a module or parameter"""
    metrics_processor: Callable[[Any, Any], Any]
    """(job, parallel_dims) -> TorchTitan's metrics of a job, without its logger for wandb"""
    wandb_logger: Callable[[Any, Any], Any]
    """(folder, job) -> TorchTitan's logger for wandb, whose files are in the folder"""
    hugging_face_tokenizer: Callable[[str], Any]
    """The tokenizer in a folder"""


def engine() -> Engine:
    """The engine of the installed release, imported here because engines import this package."""
    try:
        return import_module(f"mxtrain.titan.{RELEASE}.engine")
    except ImportError as error:
        if not (error.name or "").startswith("torchtitan"):
            raise
        raise lacks(str(error)) from error
