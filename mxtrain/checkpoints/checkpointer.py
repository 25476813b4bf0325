"""Saves the checkpoints of a run when they are due, and loads the one from which it starts.

``Checkpointer`` takes the place of TorchTitan's ``CheckpointManager``, with the same settings. It calls PyTorch's
distributed checkpoint (DCP), with a writer whose checkpoints are whole or absent (``mxtrain.checkpoints.storage``).
"""

import gc
import logging
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from mxtrain.checkpoints.folder import SAVING, Checkpoints, step_of, withdraw
from mxtrain.checkpoints.storage import CheckpointWriter, cause, load, read_index
from mxtrain.errors import ConfigError
from mxtrain.files import reason

TRAIN_STATE = "train_state"
"""Name of the trainer's own state: its step and the tokens that it has seen"""
RANDOM_STATE = "rng"
"""Name of the random number generators' states (``mxtrain.checkpoints.states``)"""
ASYNC_WITH_PINNED_MEMORY = "async_with_pinned_mem"

logger = logging.getLogger(__name__)


class SaveError(RuntimeError):
    """The last checkpoint of a run cannot be saved. The message is for the user, without a traceback."""


class Checkpointer:
    """Saves whole checkpoints, and loads the one from which the run starts. TorchTitan's trainer calls it.

    Args:
        run: the trainer. Its methods are called on all ranks, and return the same there:
            start: where the run starts.
            saved_name(name): the name in checkpoints of a weight in the model.
            manifest(step, holds_trainer): the manifest of a checkpoint, without its files.
            may_save(step): whether the weights after this step are worth a checkpoint.
            before_save(): called before a checkpoint is saved.
            is_stopping(): whether training ends after this step, whose checkpoint is then due.
            after_load(): called when a checkpoint has been loaded.
        sd_adapter: converts weights to the names of Hugging Face and back; None if the model has no such adapter.

    Attributes:
        states: what a checkpoint holds beside the weights, by name.
        saved_step: the latest step that was saved, or is being saved.
    """

    saved_step: int | None = None

    def __init__(
        self,
        run,
        dataloader,
        model_parts,
        optimizers,
        lr_schedulers,
        states,
        checkpoint_config,
        sd_adapter,
        base_folder,
    ):
        self._run = run
        self.states = {**states, "optimizer": optimizers, "dataloader": dataloader, "lr_scheduler": lr_schedulers}
        self.model_parts = model_parts
        self.folder = Path(base_folder, checkpoint_config.folder)
        self._settings, self._adapter = checkpoint_config, sd_adapter
        self._removing = ThreadPoolExecutor(1)
        self._saved: Future | None = None
        self._staged: Future | None = None
        self._failure: str | None = None  # why the latest checkpoint could not be saved
        self._group = self._stager = None
        if checkpoint_config.enable and checkpoint_config.async_mode != "disabled":
            self._group = dist.new_group(backend="gloo")
            if torch.cuda.is_available():  # on a CPU, DCP copies the state by itself
                shared = checkpoint_config.async_mode == ASYNC_WITH_PINNED_MEMORY
                # Pinned memory, as much as the state has bytes, is kept from one save to the next.
                self._stager = kept_stager(StagingOptions(use_shared_memory=shared, use_async_staging=shared))

    def load(self, step: int = -1) -> bool:
        """Load the checkpoint from which the run starts, whatever ``step`` is. Return whether there is one."""
        settings, checkpoint = self._settings, self._run.start.checkpoint
        if not settings.enable:
            return False
        is_own = checkpoint is not None and checkpoint.parent == self.folder
        source = checkpoint or (settings.initial_load_path and Path(settings.initial_load_path))
        if not is_own and settings.initial_load_in_hf:
            self._load_from_hugging_face(source)
        elif source is None:
            return False
        else:
            self._load(source, step_of(source.name) == 0 if is_own else settings.initial_load_model_only)
        gc.collect(1)
        self._run.after_load()
        return True

    @torch.no_grad()
    def _load(self, checkpoint: Path, model_only: bool) -> None:
        logger.info(f"Loading the checkpoint {checkpoint}")
        weights, index = self._weights(), read_index(checkpoint)
        excluded = self._settings.exclude_from_loading
        states = {} if not model_only and "model" in excluded else dict(weights)
        if not model_only:
            # The random numbers are in no checkpoint of weights. A run that starts at step 1 again has its own seed.
            saved = {name.partition(".")[0] for name in index.state_dict_metadata}
            own = {RANDOM_STATE} if TRAIN_STATE in excluded else {RANDOM_STATE} - saved
            states |= {name: state for name, state in self.states.items() if name not in {*excluded, *own}}
        load(states, checkpoint, index)
        self._set_weights({name: value for name, value in states.items() if name in weights})

    @torch.no_grad()
    def _load_from_hugging_face(self, folder: Path | None) -> None:
        adapter = self._adapter
        folder = folder or (adapter and adapter.hf_assets_path and Path(adapter.hf_assets_path))
        if not (adapter and folder and folder.is_dir()):
            raise ConfigError(
                "checkpoint.initial_load_in_hf = True needs a model that TorchTitan reads from Hugging Face, and its "
                "folder in checkpoint.initial_load_path or model.hf_assets_path"
            )
        logger.info(f"Loading weights of Hugging Face from {folder}")
        weights = adapter.to_hf(self._weights())
        reader = adapter.get_hf_storage_reader(str(folder), self._settings.initial_load_in_hf_quantized)
        dcp.load(weights, storage_reader=reader)
        self._set_weights(adapter.from_hf(weights))

    def _weights(self) -> dict:
        states = [get_model_state_dict(part) for part in self.model_parts]
        return {self._run.saved_name(name): value for state in states for name, value in state.items()}

    def _set_weights(self, weights: dict) -> None:
        for part in self.model_parts:
            names = {name: self._run.saved_name(name) for name in get_model_state_dict(part)}
            own = {name: weights[saved] for name, saved in names.items() if saved in weights}
            set_model_state_dict(part, own, options=StateDictOptions(strict=False))

    def save(self, curr_step: int, last_step: bool = False, weights_only: bool | None = None) -> None:
        """Save a checkpoint if one is due. If the disk is full or cannot be written, training goes on without it.

        ``weights_only`` is ``checkpoint.last_save_model_only`` after the last step, unless the caller decides.
        """
        settings = self._settings
        is_first = curr_step == 1 and settings.enable_first_step_checkpoint
        is_due = is_first or last_step or self._run.is_stopping() or curr_step % settings.interval == 0
        if not (is_due and settings.enable and not settings.load_only and self._run.may_save(curr_step)):
            return
        self._wait()
        self._failure, self.saved_step = None, curr_step
        self._run.before_save()
        if weights_only is None:
            weights_only = last_step and settings.last_save_model_only
        logger.info(f"Saving the checkpoint of step {curr_step}")
        with self._going_on():
            self._save(curr_step, weights_only, "disabled" if last_step else settings.async_mode)
            self._remove_stale()
        gc.collect(1)  # TorchTitan has switched automatic collections off

    @torch.no_grad()
    def _save(self, step: int, weights_only: bool, mode: str) -> None:
        states = self._weights() if weights_only else self._weights() | self.states
        if weights_only and self._settings.export_dtype != "float32":
            dtype = getattr(torch, self._settings.export_dtype)
            states = {name: value.to(dtype) for name, value in states.items()}
        manifest = self._run.manifest(step, holds_trainer=not weights_only)
        writer = CheckpointWriter(self.folder / f"step-{step}", manifest, self._settings.verify)
        if mode == "disabled":
            dcp.save(states, storage_writer=writer)
            return
        other_process = mode == ASYNC_WITH_PINNED_MEMORY
        saved = dcp.async_save(
            states,
            storage_writer=writer,
            process_group=self._group,
            async_checkpointer_type=AsyncCheckpointerType.PROCESS if other_process else AsyncCheckpointerType.THREAD,
            async_stager=self._stager,
        )
        if isinstance(saved, AsyncSaveResponse):
            self._saved, self._staged = saved.upload_completion, saved.staging_completion
        else:
            self._saved = saved

    def maybe_wait_for_staging(self) -> None:
        """Wait until the state has been copied, before the optimizer changes it."""
        if self._staged is not None:
            self._staged.result()
            self._staged = None

    def finish(self) -> None:
        """Wait until the latest checkpoint is complete. Raises SaveError if it could not be saved."""
        self._wait()
        if self._failure:
            newest = Checkpoints(self.folder).newest
            rest = f"the newest whole checkpoint is {newest}" if newest else "there is no whole checkpoint"
            raise SaveError(f"{self._failure}; {rest}")

    def close(self) -> None:
        """Wait until old checkpoints are removed, and free memory."""
        self._removing.shutdown()
        if self._stager is not None:
            self._stager.close()

    def _wait(self) -> None:
        saved, self._saved = self._saved, None
        if saved is not None:
            with self._going_on():
                saved.result()

    @contextmanager
    def _going_on(self) -> Iterator[None]:
        """Turn a file system's failure to save into a warning. All ranks see the same failure."""
        what = f"step {self.saved_step}: the checkpoint cannot be saved"
        try:
            yield
            return
        except OSError as error:  # the process in which DCP saves has ended
            self._failure = f"{what}: {reason(error)}"
        except CheckpointException as error:
            self._failure = f"{what}: {cause(error)}"
            if not all(isinstance(failure, OSError) for failure, _ in error.failures.values()):
                raise RuntimeError(self._failure) from error
        logger.warning(f"{self._failure}; training goes on")
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / SAVING, ignore_errors=True)  # the disk may be full

    def _remove_stale(self) -> None:
        """Remove stale checkpoints, in a thread. A look at a checkpoint takes milliseconds: none where all are kept."""
        if dist.get_rank() == 0 and self._settings.keep_latest_k:
            try:
                for path in Checkpoints(self.folder).stale(self._settings.keep_latest_k):
                    self._removing.submit(shutil.rmtree, withdraw(path), ignore_errors=True)
            except OSError as error:
                logger.warning(f"{error.filename}: old checkpoints cannot be removed: {reason(error)}")


def kept_stager(options: StagingOptions) -> DefaultStager:
    """Return what copies states to the CPU, into the same memory for every save."""
    stager = DefaultStager(options)
    stager._state_dict_stager.close = lambda: None  # PyTorch 2.11 calls it after every save, and fails in the next one
    return stager
