"""TorchTitan's checkpoint manager, with checkpoints that are whole or absent (``mxtrain.titan.checkpoint.writer``).

TorchTitan decides when to save and what, and offers asynchronous saving. This file decides where a checkpoint is
written, what happens if it cannot be, which one is loaded, and which old ones are removed.
"""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from unittest.mock import patch

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torchtitan.components.checkpoint import MODEL, OPTIMIZER, TRAIN_STATE, AsyncMode, CheckpointManager
from torchtitan.components.optimizer import OptimizersInBackwardContainer
from torchtitan.tools import utils
from torchtitan.tools.logging import logger

from mxtrain.errors import ConfigError
from mxtrain.files import reason
from mxtrain.run_folder.checkpoints import SAVING, Checkpoints, step_of, withdraw
from mxtrain.run_folder.manifest import Manifest, read_manifest
from mxtrain.run_folder.start import Start
from mxtrain.titan.checkpoint.early_steps import EarlySteps
from mxtrain.titan.checkpoint.reader import load, read_index
from mxtrain.titan.checkpoint.staging import KeptStager
from mxtrain.titan.checkpoint.writer import CheckpointWriter

GUARD_STATE = "guard"
"""Name of the guard's state in checkpoints of runs that have a guard (``mxtrain.recipes.schedule``)"""
RANDOM_STATE = "rng"
"""Name of the random number generators' states (``mxtrain.titan.checkpoint.random_state``)"""


class SaveError(RuntimeError):
    """The last checkpoint of a run cannot be saved. The message is for the user, without a traceback."""


class Checkpointer(CheckpointManager):
    """Saves whole checkpoints, and loads the one from which the run starts. The trainer sets the attributes."""

    start: Start
    """Where the run starts"""

    run: Manifest
    """Facts about the run for the manifest of every checkpoint"""

    may_save: Callable[[int], bool]
    """(step) -> whether the weights after this step are worth a checkpoint. Called on all ranks"""

    before_save: Callable[[], None]
    """Called on all ranks before a checkpoint is saved"""

    is_stopping: Callable[[], bool]
    """Whether training ends after this step, whose checkpoint is then due. The same on all ranks"""

    after_load: Callable[[], None]
    """Called when a checkpoint has been loaded"""

    saved_step: int | None = None
    """The latest step that was saved, or is being saved"""

    _failure: str | None = None
    """Why the latest checkpoint could not be saved"""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        if isinstance(self.states[OPTIMIZER], OptimizersInBackwardContainer):
            self.states[OPTIMIZER] = EarlySteps(self.states[OPTIMIZER])
        if self.enable and self.async_mode != AsyncMode.DISABLED and utils.device_type == "cuda":
            self.stager = KeptStager(in_background=self.async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM)

    def load(self, step: int = -1) -> bool:
        """Load the checkpoint from which the run starts, and return whether there is one.

        Args:
            step: not used; ``start`` follows from the same setting.

        Raises:
            ConfigError: the checkpoint is of another model.
        """
        if not self.enable:
            return False
        checkpoint = self.start.checkpoint
        if checkpoint is not None:
            self._require_same_model(checkpoint)
        try:
            if checkpoint is not None and checkpoint.parent == Path(self.folder):
                is_loaded = super().load(step_of(checkpoint.name))
            else:
                # TorchTitan loads initial weights only where its folder does not exist. The run's own may, empty: as a
                # link or a mount point.
                with patch.object(self, "folder", os.path.join(self.folder, "none")):
                    is_loaded = super().load()
        except CheckpointException as error:  # not an Exception: other handlers would let it pass
            problem = f"{checkpoint or 'the initial checkpoint'} cannot be loaded"
            for failure, _ in error.failures.values():
                if isinstance(failure, UnpicklingError):
                    name = str(failure).partition("GLOBAL ")[2].partition(" ")[0]
                    raise ConfigError(f"{problem}: it names {name or 'no plain value'}, and could run code") from error
            raise RuntimeError(f"{problem}: {_words(error)}") from error
        if is_loaded:
            self.after_load()
        return is_loaded

    def _states_to_load(self, model_only: bool) -> dict:
        states = super()._states_to_load(model_only)
        # A run that starts at step 1 again begins with an empty window, because the guard's state has numbers of steps,
        # and with its own seed. A checkpoint of weights has neither state.
        begins = "train_state" in self.exclude_from_loading
        for name in (GUARD_STATE, RANDOM_STATE):
            if name in states and (begins or not _holds(self.start.checkpoint, name)):
                del states[name]
        return states

    def dcp_load(self, state_dict: dict, checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        if from_hf:
            return super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
        load(state_dict, Path(checkpoint_id))
        self.states[MODEL].load_state_dict(state_dict)

    def _require_same_model(self, checkpoint: Path) -> None:
        saved = read_manifest(checkpoint).tensors
        for name, tensor in self.states[MODEL].state_dict().items():
            if name not in saved:
                raise ConfigError(f"model.flavor: {checkpoint} is of another model: it has no {name}")
            if saved[name]["shape"] != list(tensor.shape):
                raise ConfigError(
                    f"model.flavor: {checkpoint} is of another model: its {name} has shape {saved[name]['shape']}, "
                    f"and this model's has {list(tensor.shape)}"
                )

    def save(self, curr_step: int, last_step: bool = False) -> None:
        """Save a checkpoint if one is due. If the disk is full or cannot be written, training goes on without it."""
        if not self._should_save(curr_step, last_step) or not self.may_save(curr_step):
            return
        self._async_wait()
        self._failure, self.saved_step = None, curr_step
        self.before_save()
        with self._going_on(f"step {curr_step}: the checkpoint cannot be saved"):
            super().save(curr_step, last_step)
            if last_step:  # TorchTitan removes nothing then
                self._purge_stale_checkpoints()

    def _should_save(self, curr_step: int, last_step: bool = False) -> bool:
        return super()._should_save(curr_step, last_step or self.is_stopping())

    def finish(self) -> None:
        """Wait until the latest checkpoint is complete.

        Raises:
            SaveError: it could not be saved.
        """
        if self.enable:
            self._async_wait()
            if self._failure:
                newest = Checkpoints(Path(self.folder)).newest
                rest = f"the newest whole checkpoint is {newest}" if newest else "there is no whole checkpoint"
                raise SaveError(f"{self._failure}; {rest}")

    def dcp_save(
        self, state_dict, checkpoint_id: str, async_mode: AsyncMode, enable_garbage_collection=False, to_hf=False
    ):
        checkpoint = Path(checkpoint_id)
        manifest = replace(self.run, step=step_of(checkpoint.name), holds_trainer=TRAIN_STATE in state_dict)
        writer = CheckpointWriter(checkpoint, manifest, frozenset(self.states) - {MODEL})
        if async_mode == AsyncMode.DISABLED:
            dcp.save(state_dict, storage_writer=writer)
            if enable_garbage_collection:
                utils.GarbageCollection.collect("GC collection invoked by checkpointer.")
            return None
        other_process = async_mode == AsyncMode.ASYNC_WITH_PINNED_MEM
        return dcp.async_save(
            state_dict,
            storage_writer=writer,
            process_group=self.pg,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if other_process else AsyncCheckpointerType.THREAD,
            async_stager=self.stager,  # None on a CPU, where DCP copies the state by itself
        )

    def _async_wait(self) -> None:
        with self._going_on(f"step {self.saved_step}: the checkpoint cannot be saved"):
            try:
                super()._async_wait()
            finally:
                self.save_future = None

    @contextmanager
    def _going_on(self, what: str) -> Iterator[None]:
        """Turn a file system's failure into a warning. All ranks see the same failure."""
        try:
            yield
        except OSError as error:  # the process in which DCP saves has ended
            self._note_failure(f"{what}: {reason(error)}")
        except CheckpointException as error:
            failures = {rank: wrapped[0] for rank, wrapped in error.failures.items()}
            if not all(isinstance(failure, OSError) for failure in failures.values()):
                raise RuntimeError(f"{what}: {_words(error)}") from error
            self._note_failure(f"{what}: {_words(error)}")

    def _note_failure(self, failure: str) -> None:
        self._failure = failure
        logger.warning(f"{failure}; training goes on")
        if dist.get_rank() == 0:
            shutil.rmtree(Path(self.folder) / SAVING, ignore_errors=True)  # the disk may be full

    def _purge_stale_checkpoints(self) -> None:
        """Remove stale checkpoints, in TorchTitan's thread for that. TorchTitan counts parts of checkpoints, too."""
        if self.keep_latest_k > 0 and dist.get_rank() == 0:
            try:
                for path in Checkpoints(Path(self.folder)).stale(self.keep_latest_k):
                    self.purge_queue.put(str(withdraw(path)))
            except OSError as error:
                logger.warning(f"{error.filename}: old checkpoints cannot be removed: {reason(error)}")


def _holds(checkpoint: Path, state: str) -> bool:
    names = read_index(checkpoint).state_dict_metadata
    return any(name == state or name.startswith(f"{state}.") for name in names)


def _words(error: CheckpointException) -> str:
    rank, (failure, _) = next(iter(error.failures.items()))
    words = reason(failure) if isinstance(failure, OSError) else f"{type(failure).__name__}: {failure}"
    return f"{words} (on rank {rank})" if dist.get_world_size() > 1 else words
