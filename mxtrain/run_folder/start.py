"""Whether a run may start in a folder, and at which step: no run replaces the results of another.

TorchTitan resumes from the newest complete checkpoint in the run's folder. Without one it starts at step 1 and says
nothing, even if the folder holds results or damaged checkpoints. ``find_start`` looks first and stops such a run.
"""

import os
from dataclasses import dataclass, fields
from pathlib import Path

from mxtrain.errors import ConfigError
from mxtrain.run_folder.checkpoints import DCP_MARK, Checkpoints
from mxtrain.run_folder.files import METRICS_FILE, reason


@dataclass(frozen=True)
class CheckpointSettings:
    """The settings of ``[checkpoint]`` that decide where a run starts, with TorchTitan's names and defaults."""

    enable: bool = False
    folder: str = "checkpoint"
    load_step: int = -1
    load_only: bool = False
    create_seed_checkpoint: bool = False
    initial_load_path: str | None = None
    initial_load_in_hf: bool = False
    exclude_from_loading: list | tuple = ()

    @classmethod
    def of(cls, section) -> "CheckpointSettings":
        """Copy the settings from TorchTitan's own section."""
        return cls(**{field.name: getattr(section, field.name) for field in fields(cls)})


@dataclass(frozen=True)
class Start:
    step: int
    """Number of steps that are done"""
    notes: tuple[str, ...] = ()
    """Lines for the user: where the run starts, unless it starts from nothing, and what it leaves alone"""


def require_folder(name: object) -> Path:
    """Return ``job.dump_folder`` as a path, with the user's home for "~".

    Raises ConfigError if it is not a name, for example empty.
    """
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ConfigError(f"job.dump_folder = {name!r} is not the name of a folder")
    return Path(os.path.expanduser(name))


def latest_checkpoint(folder: Path, checkpoint: CheckpointSettings) -> Path | None:
    """Return the newest complete checkpoint of the run in ``folder``."""
    saved = Checkpoints(folder / checkpoint.folder)
    return saved.path(max(saved.complete)) if checkpoint.enable and saved.complete else None


def find_start(folder: Path, checkpoint: CheckpointSettings, processes: int) -> Start:
    """Return where a run with these settings and this number of processes starts in ``folder``, which need not exist.

    Raises:
        ConfigError: if the run would replace results, start at step 1 although the folder holds checkpoints, fail to
            load its checkpoint, or ignore a setting; and if the folder cannot be read.
    """
    try:
        return _find_start(folder, checkpoint, processes)
    except OSError as error:
        message = f"job.dump_folder = {str(folder)!r} cannot be read: {error.filename}: {reason(error)}"
        raise ConfigError(message) from error


def _find_start(folder: Path, checkpoint: CheckpointSettings, processes: int) -> Start:
    saved = Checkpoints(folder / checkpoint.folder)
    for name in saved.misnamed:
        raise ConfigError(
            f"checkpoint.folder: TorchTitan would take {saved.folder / name} for a checkpoint to resume from, and not "
            "find it; move it out of this folder"
        )
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
        _require_no_metrics(folder, f"with the weights in {path} training starts at step 1")
        return Start(0, (f"training starts from the weights in {path}",))
    _require_trainer_state(saved, step)
    return Start(step, (f"resuming after step {step}, from {path}", *_left_alone(saved, step)))


def _require_no_metrics(folder: Path, because: str) -> None:
    metrics = folder / METRICS_FILE
    if metrics.is_file() and metrics.stat().st_size > 0:
        raise ConfigError(
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
    complete = ", ".join(map(str, sorted(saved.complete))) or "no complete checkpoint"
    if wanted != -1:
        if wanted not in saved.complete:
            raise ConfigError(f"checkpoint.load_step = {wanted} is not among the steps in {saved.folder}: {complete}")
        return wanted
    if saved.found and not saved.complete:
        raise ConfigError(
            f"checkpoint.folder: {saved.folder} holds no complete checkpoint, only parts ({', '.join(saved.found)}); "
            "remove them and the run's metrics to start at step 1, or choose another job.dump_folder"
        )
    return max(saved.complete, default=None)


def _start_of_new_run(folder: Path, saved: Checkpoints, checkpoint: CheckpointSettings) -> Start:
    _require_no_metrics(folder, f"{saved.folder} holds no checkpoint from which it could resume")
    initial = checkpoint.initial_load_path
    if not (initial or checkpoint.initial_load_in_hf):
        if checkpoint.load_only:
            raise ConfigError(f"checkpoint.load_only: {saved.folder} holds no checkpoint that could be loaded")
        return Start(0)
    if saved.folder.exists():
        setting = f"initial_load_path = {initial!r}" if initial else "initial_load_in_hf"
        raise ConfigError(
            f"checkpoint.{setting} would be ignored, because {saved.folder} exists, although empty; remove it"
        )
    if initial and not Path(initial).is_dir():
        raise ConfigError(
            f"checkpoint.initial_load_path = {initial!r} is not a folder: give the folder of one checkpoint, such as "
            "outputs/RUN/checkpoint/step-1000"
        )
    if initial and not checkpoint.initial_load_in_hf and not (Path(initial) / DCP_MARK).is_file():
        raise ConfigError(
            f"checkpoint.initial_load_path = {initial!r} holds no complete checkpoint: {DCP_MARK} is missing; name the "
            "folder of one step, such as outputs/a/checkpoint/step-100"
        )
    return Start(0)


def _require_trainer_state(saved: Checkpoints, step: int) -> None:
    if saved.has_trainer_state(step):
        return
    earlier = [other for other in saved.complete if 0 < other < step and saved.has_trainer_state(other)]
    resume = f"resume from an earlier step with checkpoint.load_step = {max(earlier)}, or " if earlier else ""
    raise ConfigError(
        f"checkpoint.last_save_model_only: {saved.path(step)} is the end of a run and holds only its weights: "
        f"no run can resume from it; {resume}start a new run from these weights in another job.dump_folder with "
        f"checkpoint.initial_load_path = {str(saved.path(step))!r}"
    )


def _left_alone(saved: Checkpoints, step: int) -> list[str]:
    notes = []
    if saved.incomplete:
        notes.append(f"incomplete checkpoints are left alone: {', '.join(saved.incomplete)}")
    later = [f"step-{other}" for other in sorted(saved.complete) if other > step]
    if later:
        notes.append(f"later checkpoints stay until they are replaced; a resume takes the latest: {', '.join(later)}")
    return notes
