"""The releases of TorchTitan that mxtrain runs: a folder of files for each, behind one interface.

A new release is a row of ``mxtrain.settings.releases.RELEASES`` and a folder whose ``engine.py`` is an ``Engine``. To
drop a release, delete both.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from importlib import import_module
from typing import Any, Protocol

from torch import nn

from mxtrain.settings.fields import Problems
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

    def register(self) -> None:
        """Make mxtrain known to TorchTitan, once, when ``mxtrain.titan`` is imported."""

    def models(self) -> Iterable[str]:
        """The names of all models that somebody has registered."""

    def converters(self) -> Iterable[str]:
        """The names of all converters that somebody has registered."""

    def sizes_of(self, job: Any) -> dict[str, Any]:
        """The sizes of a job's model by their names in ``[model_args]``, "vocab_size" and "seq_len"."""

    def layout_problems(self, settings: Any) -> Problems:
        """Degrees of parallelism that the release does not have for a model."""

    def build_on_meta(self, job: Any) -> nn.Module:
        """A job's model as TorchTitan builds it before converters, on the meta device."""

    def convertible(self, model: nn.Module) -> AbstractContextManager:
        """Context in which converters know the modules of ``model``, under the names of TorchTitan 0.2.2."""

    def example_inputs(self, model: nn.Module) -> tuple:
        """Arguments for one forward pass of a language model without data."""

    def saved_name(self, name: str) -> str:
        """The name in checkpoints of a module or parameter."""

    def metrics_processor(self, job: Any, parallel_dims: Any) -> Any:
        """TorchTitan's metrics of a job, without its logger for wandb."""

    def wandb_logger(self, folder: Any, job: Any) -> Any:
        """TorchTitan's logger for wandb, whose files are in ``folder``."""

    def hugging_face_tokenizer(self, folder: str) -> Any:
        """The tokenizer in a folder."""


def engine() -> Engine:
    """The engine of the installed release, imported here because engines import this package."""
    try:
        return import_module(f"mxtrain.titan.{RELEASE}.engine")
    except ImportError as error:
        if not (error.name or "").startswith("torchtitan"):
            raise
        raise lacks(str(error)) from error
