"""Whether a run may start in a folder, and at which step: no run replaces the results of another.

A run resumes from the newest whole checkpoint in its folder. Damaged ones are named and passed over, unless the user
asked for one of them. TorchTitan alone would start at step 1 and say nothing in a folder with damaged checkpoints, or
with the results of another run. ``find_start`` looks first and stops such a run.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from types import MappingProxyType

from mxtrain.errors import ConfigError
from mxtrain.files import reason, replace_file
from mxtrain.run_folder.checkpoints import DCP_METADATA, LEFTOVERS, SET_ASIDE, Checkpoints, read_whole, step_of
from mxtrain.run_folder.files import METRICS_FILE
from mxtrain.run_folder.interrupted import interrupted_after
from mxtrain.run_folder.manifest import MANIFEST_FILE, DamagedCheckpoint, read_manifest
from mxtrain.run_folder.titan_defaults import CHECKPOINT_FOLDER


@dataclass(frozen=True)
class CheckpointSettings:
    """The settings of ``[checkpoint]`` that decide where a run starts, with TorchTitan's names and defaults."""

    enable: bool = False
    folder: str = CHECKPOINT_FOLDER
    load_step: int = -1
    load_only: bool = False
    create_seed_checkpoint: bool = False
    initial_load_path: str | None = None
    initial_load_in_hf: bool = False
    initial_load_model_only: bool = True
    exclude_from_loading: list | tuple = ()

    @classmethod
    def of(cls, section) -> "CheckpointSettings":
        """Copy the settings from TorchTitan's own section."""
        return cls(**{field.name: getattr(section, field.name) for field in fields(cls)})


class NothingToResume(ConfigError):
    """The folder holds the results of a run, but no whole checkpoint from which it could go on."""


@dataclass(frozen=True)
class Start:
    step: int
    """Number of steps that are done"""
    notes: tuple[str, ...] = ()
    """Lines for the user: where the run starts, unless it starts from nothing, and what it passes over"""
    checkpoint: Path | None = None
    """The checkpoint that is loaded, with a manifest"""
    abandoned: tuple[Path, ...] = ()
    """Checkpoints of later steps, whole or not, which the run sets aside"""


def require_folder(name: object) -> Path:
    """Return ``job.dump_folder`` as a path, with the user's home for "~".

    Raises ConfigError if it is not a name, for example empty.
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ConfigError(f"job.dump_folder = {name!r} is not the name of a folder")
    return Path(os.path.expanduser(name))


def latest_checkpoint(folder: Path, checkpoint: CheckpointSettings) -> Path | None:
    """Return the newest whole checkpoint of the run in ``folder``."""
    return Checkpoints(folder / checkpoint.folder).newest if checkpoint.enable else None


def resumed_step(folder: Path, checkpoint: CheckpointSettings) -> int:
    """Return the number of steps that are done when the run in ``folder`` begins, under TorchTitan's trainer, too."""
    if not checkpoint.enable or "train_state" in checkpoint.exclude_from_loading:
        return 0
    if checkpoint.load_step != -1:
        return checkpoint.load_step
    saved = Checkpoints(folder / checkpoint.folder)
    of_titan = [step_of(name) for name in saved.found if os.path.isfile(saved.folder / name / DCP_METADATA)]
    return max(saved.whole or of_titan, default=0)


def find_start(
    folder: Path, checkpoint: CheckpointSettings, processes: int, damaged: Mapping[str, str] = MappingProxyType({})
) -> Start:
    """Return where a run with these settings and this number of processes starts in ``folder``, which need not exist.

    Args:
        damaged: names of checkpoints in the folder whose contents are known to be wrong -> what is wrong with them.

    Raises:
        NothingToResume: if the run would replace results, or all checkpoints are damaged.
        ConfigError: if it would start at step 1 although the folder holds checkpoints, fail to load its checkpoint, or
            ignore a setting; and if the folder cannot be read.
    """
    try:
        return _find_start(folder, checkpoint, processes, damaged)
    except OSError as error:
        message = f"job.dump_folder = {str(folder)!r} cannot be read: {error.filename}: {reason(error)}"
        raise ConfigError(message) from error


def _find_start(folder: Path, checkpoint: CheckpointSettings, processes: int, damaged: Mapping[str, str]) -> Start:
    saved = Checkpoints(folder / checkpoint.folder, damaged)
    if checkpoint.create_seed_checkpoint:
        return _start_of_seed(folder, saved, checkpoint, processes)
    if not checkpoint.enable:
        if saved.found:
            raise ConfigError(
                f"checkpoint.enable = False, but {saved.folder} holds {saved.found[-1]}; set checkpoint.enable to "
                "resume, or choose another job.dump_folder to start at step 1"
            )
        _require_no_metrics(folder, "checkpoint.enable is False")
        return Start(0)
    step = _step_to_load(saved, checkpoint.load_step)
    if step is None:
        return _start_of_new_run(folder, saved, checkpoint)

    path = saved.path(step)
    if step == 0 or "train_state" in checkpoint.exclude_from_loading:
        if not _begins_again(folder, checkpoint):
            _require_no_metrics(folder, f"with the weights in {path} training starts at step 1")
        if saved.after(0) and not checkpoint.load_only:
            raise ConfigError(
                f"with the weights in {path} training starts at step 1, and its checkpoints would be taken for the "
                "earlier run's: choose another job.dump_folder, with checkpoint.initial_load_path = "
                f"{str(path)!r}"
            )
        return Start(0, (f"training starts from the weights in {path}",), path)
    _require_trainer_state(saved, step)
    if checkpoint.load_only:
        _require_no_metrics(folder, "checkpoint.load_only saves none of its steps")
    # A folder that cannot be entered cannot be moved either.
    later = (path for path in saved.after(step) if os.access(path, os.R_OK))
    abandoned = () if checkpoint.load_only else tuple(later)
    notes = (f"resuming after step {step}, from {path}", *_passed_over(saved, step, abandoned))
    return Start(step, notes, path, abandoned)


def require_no_other_run(folder: Path, checkpoint: CheckpointSettings) -> None:
    """Raise ConfigError if a run that starts in ``folder`` under TorchTitan's own trainer would replace metrics."""
    if resumed_step(folder, checkpoint) == 0 and not _begins_again(folder, checkpoint):
        _require_no_metrics(folder, "there is no checkpoint from which it would resume")


def begin_again(folder: Path, checkpoint: CheckpointSettings) -> tuple[str, ...]:
    """Empty the metrics of a run that was killed before it saved, and return a line for the user; else do nothing.

    Call it before ``clear_leftovers``: parts of a checkpoint may be all that tells such a run from one that has saved.
    A second kill, before the first new row, would leave metrics that no run may replace.
    """
    again = _begins_again(folder, checkpoint)
    if again:
        with suppress(OSError):  # the first new row comes to the same, and warns if it cannot be written
            replace_file(folder / METRICS_FILE, b"")
    return again


def _begins_again(folder: Path, checkpoint: CheckpointSettings) -> tuple[str, ...]:
    """Return a line for the user if the run in ``folder`` was killed before it saved, else nothing."""
    saved = Checkpoints(folder / checkpoint.folder)
    last = None if saved.after(0) or not checkpoint.enable else interrupted_after(folder, saved.folder)
    if last is None:
        return ()
    return (f"the run in this folder ended near step {last}, before its first checkpoint: it begins again",)


def _require_no_metrics(folder: Path, because: str) -> None:
    metrics = folder / METRICS_FILE
    if metrics.is_file() and metrics.stat().st_size > 0:
        raise NothingToResume(
            f"job.dump_folder = {str(folder)!r} holds the metrics of a run ({metrics}), which this run would replace "
            f"({because}); choose another folder, or move the old one away"
        )


def _start_of_seed(folder: Path, saved: Checkpoints, checkpoint: CheckpointSettings, processes: int) -> Start:
    if processes > 1:
        raise ConfigError(f"checkpoint.create_seed_checkpoint needs one process, not {processes}: set NGPU=1")
    if checkpoint.load_only:
        raise ConfigError("checkpoint.create_seed_checkpoint saves a checkpoint, and checkpoint.load_only forbids that")
    if saved.found:
        raise ConfigError(
            f"checkpoint.create_seed_checkpoint: {saved.folder} already holds {saved.found[-1]}; choose another "
            "job.dump_folder"
        )
    _require_no_metrics(folder, "a seed is where a run starts")
    return Start(0)


def _step_to_load(saved: Checkpoints, wanted: int) -> int | None:
    """Return the step of the checkpoint that is loaded, or None if the folder holds no checkpoint at all."""
    if wanted != -1:
        if problem := saved.problems.get(f"step-{wanted}"):
            raise ConfigError(f"checkpoint.load_step = {wanted}: {saved.path(wanted)} cannot be loaded: {problem}")
        if wanted not in saved.whole:
            whole = ", ".join(map(str, saved.whole)) or "no whole checkpoint"
            raise ConfigError(f"checkpoint.load_step = {wanted} is not among the steps in {saved.folder}: {whole}")
        return wanted
    if saved.found and not saved.whole:
        problems = "; ".join(f"{name}: {problem}" for name, problem in saved.problems.items())
        raise NothingToResume(f"checkpoint.folder: {saved.folder} holds no whole checkpoint ({problems})")
    return max(saved.whole, default=None)


def _start_of_new_run(folder: Path, saved: Checkpoints, checkpoint: CheckpointSettings) -> Start:
    if not _begins_again(folder, checkpoint):
        _require_no_metrics(folder, f"{saved.folder} holds no checkpoint from which it could resume")
    initial = checkpoint.initial_load_path
    if not (initial or checkpoint.initial_load_in_hf):
        if checkpoint.load_only:
            raise ConfigError(f"checkpoint.load_only: {saved.folder} holds no checkpoint that could be loaded")
        return Start(0)
    if saved.folder.is_dir() and any(path.name not in LEFTOVERS for path in saved.folder.iterdir()):
        setting = f"initial_load_path = {initial!r}" if initial else "initial_load_in_hf"
        raise ConfigError(f"checkpoint.{setting} would be ignored, because {saved.folder} is not empty; remove it")
    if initial and not Path(initial).is_dir():
        raise ConfigError(
            f"checkpoint.initial_load_path = {initial!r} is not a folder: give the folder of one checkpoint, such as "
            "outputs/RUN/checkpoint/step-1000"
        )
    if not initial or checkpoint.initial_load_in_hf:
        return Start(0)
    path = _initial_checkpoint(Path(initial))
    if checkpoint.initial_load_model_only:
        return Start(0, checkpoint=path)
    manifest = read_manifest(path) if path else None
    if manifest is None or not manifest.holds_trainer:
        raise ConfigError(
            f"checkpoint.initial_load_model_only = False needs the whole state of a run, and {initial} holds only "
            "weights"
        )
    if "train_state" in checkpoint.exclude_from_loading:
        return Start(0, (f"training starts from the weights in {path}",), path)
    return Start(manifest.step, (f"going on after step {manifest.step} of another run, from {path}",), path)


def _initial_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint of a run whose weights a new run starts with; None if it has no manifest."""
    if (path / MANIFEST_FILE).is_file():
        try:
            read_whole(path)
        except DamagedCheckpoint as error:
            raise ConfigError(f"checkpoint.initial_load_path = {str(path)!r} cannot be loaded: {error}") from error
        return path
    if not (path / DCP_METADATA).is_file():
        raise ConfigError(
            f"checkpoint.initial_load_path = {str(path)!r} holds no complete checkpoint: {DCP_METADATA} is missing; "
            "name the folder of one step, such as outputs/a/checkpoint/step-100"
        )
    return None


def _require_trainer_state(saved: Checkpoints, step: int) -> None:
    if saved.whole[step].holds_trainer:
        return
    earlier = [other for other, manifest in saved.whole.items() if 0 < other < step and manifest.holds_trainer]
    resume = f"resume from an earlier step with checkpoint.load_step = {max(earlier)}, or " if earlier else ""
    raise ConfigError(
        f"checkpoint.last_save_model_only: {saved.path(step)} is the end of a run and holds only its weights: "
        f"no run can resume from it; {resume}start a new run from these weights in another job.dump_folder with "
        f"checkpoint.initial_load_path = {str(saved.path(step))!r}"
    )


def _passed_over(saved: Checkpoints, step: int, abandoned: tuple[Path, ...]) -> list[str]:
    notes = [f"{saved.folder / name} cannot be loaded: {problem}" for name, problem in saved.problems.items()]
    if abandoned:
        later = ", ".join(path.name for path in abandoned)
        notes.append(f"checkpoints after step {step} go to {saved.folder / SET_ASIDE}: {later}")
    return notes
