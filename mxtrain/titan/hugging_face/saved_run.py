"""A run's folder read back: its settings, one of its checkpoints, the weights in it, and its model."""

import copy
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torchtitan.config import TORCH_DTYPE_MAP
from torchtitan.distributed import ParallelDims
from torchtitan.protocols.model_converter import build_model_converters
from torchtitan.protocols.train_spec import get_train_spec
from torchtitan.tools.logging import logger

from mxtrain.checkpoints.folder import Checkpoints
from mxtrain.checkpoints.manifest import DamagedCheckpoint, Manifest, check_hashes
from mxtrain.checkpoints.reader import load, read_index
from mxtrain.config import dump_config
from mxtrain.conversion.schedule import set_step
from mxtrain.errors import ConfigError
from mxtrain.run_folder.files import CONFIG_FILE
from mxtrain.settings.check import TITAN_QUANTIZING
from mxtrain.settings.fields import Field
from mxtrain.settings.read import places
from mxtrain.settings.resume import other_defaults
from mxtrain.titan.hugging_face.models import meta_model
from mxtrain.titan.job_config import parse_job_config, settings_of
from mxtrain.titan.models.llama3 import is_tied
from mxtrain.titan.models.model_args import given_in

ONE_PROCESS = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)


@dataclass(frozen=True)
class SavedRun:
    """A run and one of its checkpoints."""

    folder: Path
    step: int
    checkpoint: Path
    job_config: object
    processes: int
    """Number of processes that trained"""
    args: object
    """TorchTitan's model arguments, with the settings of the run. Attention is causal, and "sdpa"."""

    @property
    def model(self) -> str:
        return self.job_config.model.name

    @property
    def max_seq_len(self) -> int:
        """The number of positions that an export names."""
        return given_in(self.job_config).get("max_seq_len", self.args.max_seq_len)

    @cached_property
    def weights(self) -> "SavedWeights":
        return SavedWeights(self.checkpoint)

    @property
    def weight_dtype(self) -> torch.dtype:
        """The dtype in which the run's forward read its weights: FSDP's mixed precision rounds fp32 weights."""
        training = self.job_config.training
        return TORCH_DTYPE_MAP[training.mixed_precision_param if self.processes > 1 else training.dtype]

    def build(self, has_converters: bool = False) -> torch.nn.Module:
        """Return the run's model on the meta device, fp32, with mxtrain's converters as the trainer applies them.

        TorchTitan's own converters need their devices, and are left out.
        """
        model = meta_model(self.model, self.args)
        if not has_converters:
            return model
        job_config = copy.deepcopy(self.job_config)
        job_config.model.converters = [n for n in job_config.model.converters if not n.startswith(TITAN_QUANTIZING)]
        job_config.mxnorm.diagnostics.every = 0  # they need the trainer
        # No gradients are computed here, so the converters' warnings of rounding in the backward mean nothing.
        level = logger.level
        logger.setLevel(logging.ERROR)
        try:
            build_model_converters(job_config, ParallelDims(**ONE_PROCESS)).convert(model)
        finally:
            logger.setLevel(level)
        set_step(model, max(1, self.step))  # the recipes that a schedule has for this step
        return model

    def load(self, device: torch.device, has_converters: bool) -> torch.nn.Module:
        """Build the run's model in fp32, with its converters or without, and load its weights."""
        model = self.build(has_converters)
        with torch.no_grad():
            model.init_weights(buffer_device=device)  # computes the buffers, and nothing for parameters without memory
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        if is_tied(self.args):
            model.output.weight = model.tok_embeddings.weight
        self.weights.load_into({fqn: weight for fqn, weight in model.state_dict().items() if fqn in self.weights})
        return model.eval()


def open_run(folder: Path, step: int | None = None) -> SavedRun:
    """Find the checkpoint of ``step`` in the run's folder (None: the newest whole one), and read its settings.

    Raises:
        ConfigError: the folder is no run, its settings are wrong now, or it has no such checkpoint, or a damaged one.
    """
    where = f"RUN = {str(folder)!r}"
    if not (folder / CONFIG_FILE).is_file():
        raise ConfigError(f"{where} is no run: {CONFIG_FILE} is missing; give a run's folder, such as outputs/NAME")
    own = _parse(folder / CONFIG_FILE, folder)
    saved = Checkpoints(folder / own.checkpoint.folder)
    if not saved.whole:
        problems = "".join(f"; {name}: {problem}" for name, problem in saved.problems.items())
        raise ConfigError(
            f"{where} has no whole checkpoint in {saved.folder}{problems}; train with checkpoint.enable = true"
        )
    step = max(saved.whole) if step is None else step
    if problem := saved.problems.get(f"step-{step}"):
        raise _damaged(saved.path(step), problem)
    if step not in saved.whole:
        steps = ", ".join(map(str, saved.whole))
        raise ConfigError(f"--step = {step} is not among the steps in {saved.folder}: {steps}")
    manifest = saved.whole[step]
    try:
        check_hashes(saved.path(step), manifest, manifest.files)
    except DamagedCheckpoint as error:
        raise _damaged(saved.path(step), error) from error
    job_config = _settings_of(manifest, folder, settings_of(own).known)
    args = get_train_spec(job_config.model.name).model_args[job_config.model.flavor]
    args.update_from_config(job_config)
    if getattr(args, "attn_type", "sdpa") != "sdpa":
        args.attn_type, args.attn_mask_type = "sdpa", "causal"
    return SavedRun(folder, step, saved.path(step), job_config, manifest.processes, args)


def _settings_of(manifest: Manifest, folder: Path, known: Mapping[str, Field]):
    """Return the job config of a checkpoint.

    The run may have resumed with other settings since, and this version may have other defaults than the run had.
    """
    with TemporaryDirectory() as temporary:
        config, defaults = Path(temporary, CONFIG_FILE), Path(temporary, "defaults.toml")
        dump_config(other_defaults(known, manifest.defaults), defaults)
        dump_config({"extends": defaults.name, **manifest.settings}, config)
        return _parse(config, folder)


def _parse(config: Path, folder: Path):
    # All modes round to the same operands, and this machine may lack the mode of the training.
    arguments = [f"--job.config_file={config}", f"--job.dump_folder={folder}", "--mxnorm.mode=auto"]
    with places(arguments):
        return parse_job_config(arguments)


class SavedWeights:
    """The weights in a checkpoint of any layout, read one at a time on the CPU.

    Raises:
        ConfigError: the checkpoint's list of its tensors cannot be read.
    """

    def __init__(self, checkpoint: Path):
        self._checkpoint = checkpoint
        try:
            metadata = read_index(checkpoint).state_dict_metadata
        except ConfigError as error:
            raise _damaged(checkpoint, error) from error
        self._tensors = {name: value for name, value in metadata.items() if isinstance(value, TensorStorageMetadata)}

    def __contains__(self, fqn: str) -> bool:
        return fqn in self._tensors

    def __getitem__(self, fqn: str) -> torch.Tensor:
        """Return a whole weight in the checkpoint's dtype. Raises ConfigError if it cannot be read."""
        facts = self._tensors[fqn]
        weight = torch.empty(facts.size, dtype=facts.properties.dtype)
        self.load_into({fqn: weight})
        return weight

    def load_into(self, state: dict[str, torch.Tensor]) -> None:
        """Copy the weights of these names into tensors of any dtype and device. Raises ConfigError as above."""
        try:
            load(state, self._checkpoint, no_dist=True)
        except (Exception, CheckpointException) as error:  # the latter is a BaseException
            raise _damaged(self._checkpoint, error) from error

    def require(self, shapes: Mapping[str, tuple[int, ...]], optional: tuple[str, ...] = ()) -> None:
        """Raise ConfigError unless the checkpoint has every weight, in its shape. ``optional`` ones may be missing."""
        for fqn, shape in shapes.items():
            if fqn in self and tuple(self._tensors[fqn].size) != shape:
                found = f"{list(self._tensors[fqn].size)}, and {list(shape)} by {CONFIG_FILE}"
                raise _damaged(self._checkpoint, f"{fqn} has shape {found}")
            if fqn not in self and fqn not in optional:
                raise _damaged(self._checkpoint, f"{fqn} is missing")


def _damaged(checkpoint: Path, error) -> ConfigError:
    cause = " ".join(str(error).split())[:300] or type(error).__name__
    return ConfigError(f"RUN: the checkpoint {checkpoint} cannot be used: {cause}; choose another with --step")
