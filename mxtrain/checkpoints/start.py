"""Whether a run may start in a folder, and at which step: no run replaces the results of another.

A run resumes from the newest whole checkpoint in its folder. Damaged ones are named and passed over, unless the user
asked for one of them. TorchTitan alone would start at step 1 and say nothing in a folder with damaged checkpoints, or
with the results of another run. ``find_start`` looks first and stops such a run.

``checkpoint`` is always the section ``[checkpoint]`` of a job, with TorchTitan's names.
"""

import math
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pydantic import TypeAdapter

from mxtrain.checkpoints.folder import (
    DCP_METADATA,
    MANIFEST_FILE,
    SAVING,
    SET_ASIDE,
    Checkpoints,
    DamagedCheckpoint,
    Manifest,
    read_manifest,
    read_whole,
    step_of,
)
from mxtrain.checkpoints.run_folder import CHECKPOINT_FOLDER, CHECKPOINT_INTERVAL, CONFIG_FILE, METRICS_FILE, STEPS
from mxtrain.errors import ConfigError
from mxtrain.files import parse, read_toml, reason


@dataclass(frozen=True)
class Start:
    """Where a run starts. It is made once per run, and everything that depends on the start takes it."""

    step: int = 0
    """Number of steps that are done"""
    notes: tuple[str, ...] = ()
    """Lines for the user: where the run starts, unless it starts from nothing, and what it passes over"""
    checkpoint: Path | None = None
    """The checkpoint that is loaded, with a manifest"""
    abandoned: tuple[Path, ...] = ()
    """Checkpoints of later steps, whole or not, which the run sets aside"""
    changes: tuple[str, ...] = ()
    """Lines for the user and for the run's record: what differs from the run so far"""
    settings: dict[str, str] = field(default_factory=dict)
    """Full name -> value of settings that the run keeps, whatever its config and flags say"""

    @cached_property
    def manifest(self) -> Manifest:
        return read_manifest(self.checkpoint)

    def to_json(self) -> dict:
        return TypeAdapter(Start).dump_python(self, mode="json")

    @classmethod
    def from_json(cls, value: dict) -> "Start":
        return TypeAdapter(cls).validate_python(value)


def require_folder(name: object) -> Path:
    """Return ``job.dump_folder`` as a path, with the user's home for "~"."""
    if not isinstance(name, str) or not name.strip() or "\0" in name:
        raise ConfigError(f"job.dump_folder = {name!r} is not the name of a folder; write one such as outputs/a")
    return Path(os.path.expanduser(name))


def latest_checkpoint(folder: Path, checkpoint) -> Path | None:
    return Checkpoints(folder / checkpoint.folder).newest if checkpoint.enable else None


def resumed_step(folder: Path, checkpoint) -> int:
    """Return the number of steps that are done when the run in ``folder`` begins, under TorchTitan's trainer, too."""
    if not checkpoint.enable or "train_state" in checkpoint.exclude_from_loading:
        return 0
    if checkpoint.load_step != -1:
        return checkpoint.load_step
    saved = Checkpoints(folder / checkpoint.folder)
    of_titan = [step_of(name) for name in saved.found if os.path.isfile(saved.folder / name / DCP_METADATA)]
    return max(saved.whole or of_titan, default=0)


def find_start(folder: Path, checkpoint, processes: int) -> Start:
    """Return where a run with these settings and this number of processes starts in ``folder``, which may not exist."""
    try:
        saved = Checkpoints(folder / checkpoint.folder)
        if checkpoint.create_seed_checkpoint:
            if processes > 1:
                raise ConfigError(f"checkpoint.create_seed_checkpoint needs one process, not {processes}: set NGPU=1")
            return _start_anew(folder, saved, "checkpoint.create_seed_checkpoint", "a seed is where a run starts")
        if not checkpoint.enable:
            return _start_anew(folder, saved, "checkpoint.enable = False", "checkpoint.enable is False")
        step = saved.choose(None if checkpoint.load_step == -1 else checkpoint.load_step, "checkpoint.load_step")
        if step is None:
            return _start_of_new_run(folder, saved, checkpoint)
        if step == 0 or "train_state" in checkpoint.exclude_from_loading:
            return _start_from_own_weights(folder, saved, checkpoint, saved.path(step))
        return _resumed(folder, saved, checkpoint, step)
    except OSError as error:
        message = f"job.dump_folder = {str(folder)!r} cannot be read: {error.filename}: {reason(error)}"
        raise ConfigError(message) from error


def _start_anew(folder: Path, saved: Checkpoints, setting: str, because: str) -> Start:
    if saved.found:
        raise ConfigError(
            f"{setting}, but {saved.folder} holds {saved.found[-1]}; set only checkpoint.enable to resume, or choose "
            "another job.dump_folder to start at step 1"
        )
    _require_no_metrics(folder, because)
    return Start()


def _start_from_own_weights(folder: Path, saved: Checkpoints, checkpoint, path: Path) -> Start:
    if interrupted_after(folder) is None:
        _require_no_metrics(folder, f"with the weights in {path} training starts at step 1")
    if saved.after(0) and not checkpoint.load_only:
        raise ConfigError(
            f"training from the weights in {path} starts at step 1, but {saved.folder} has later steps; "
            f"choose another job.dump_folder, and set checkpoint.initial_load_path = {str(path)!r}"
        )
    return _from_weights(path)


def _from_weights(path: Path) -> Start:
    return Start(0, (f"training starts from the weights in {path}",), path)


def _resumed(folder: Path, saved: Checkpoints, checkpoint, step: int) -> Start:
    path = saved.path(step)
    if not saved.whole[step].holds_trainer:
        raise ConfigError(
            f"checkpoint.last_save_model_only: {path} holds only weights, so no run can resume from it; name an "
            "earlier step in checkpoint.load_step, or start a new run in another job.dump_folder with "
            f"checkpoint.initial_load_path = {str(path)!r}"
        )
    if checkpoint.load_only:
        _require_no_metrics(folder, "checkpoint.load_only saves none of its steps")
    abandoned = () if checkpoint.load_only else tuple(saved.after(step))
    notes = [f"resuming after step {step}, from {path}"]
    notes += [f"{saved.folder / name} cannot be loaded: {problem}" for name, problem in saved.problems.items()]
    if abandoned:
        names = ", ".join(later.name for later in abandoned)
        notes.append(f"checkpoints after step {step} go to {saved.folder / SET_ASIDE}: {names}")
    return Start(step, tuple(notes), path, abandoned)


def _start_of_new_run(folder: Path, saved: Checkpoints, checkpoint) -> Start:
    if interrupted_after(folder) is None:
        _require_no_metrics(folder, f"{saved.folder} holds no checkpoint from which it could resume")
    initial = checkpoint.initial_load_path
    if checkpoint.load_only and not (initial or checkpoint.initial_load_in_hf):
        raise ConfigError(f"checkpoint.load_only: {saved.folder} holds no checkpoint to load; set it to false")
    if not initial or checkpoint.initial_load_in_hf:
        return Start()
    path, manifest = Path(initial), None
    if (path / MANIFEST_FILE).is_file() or not (path / DCP_METADATA).is_file():  # else TorchTitan has written it
        try:
            manifest = read_whole(path)
        except DamagedCheckpoint as error:
            raise ConfigError(
                f"checkpoint.initial_load_path = {initial!r} cannot be loaded: {error}; name the folder of one step, "
                "such as outputs/a/checkpoint/step-100"
            ) from error
    if checkpoint.initial_load_model_only:
        return Start(checkpoint=manifest and path)
    if manifest is None or not manifest.holds_trainer:
        raise ConfigError(
            f"checkpoint.initial_load_model_only = False needs the whole state of a run, and {initial} holds only "
            "weights; set it to true, or name another checkpoint"
        )
    if "train_state" in checkpoint.exclude_from_loading:
        return _from_weights(path)
    return Start(manifest.step, (f"going on after step {manifest.step} of another run, from {path}",), path)


def require_no_other_run(folder: Path, checkpoint) -> None:
    """Raise ConfigError if a run that starts in ``folder`` under TorchTitan's own trainer would replace metrics."""
    may_begin = checkpoint.enable and interrupted_after(folder) is not None
    if resumed_step(folder, checkpoint) == 0 and not may_begin:
        _require_no_metrics(folder, "there is no checkpoint from which it would resume")


def _require_no_metrics(folder: Path, because: str) -> None:
    metrics = folder / METRICS_FILE
    if metrics.is_file() and metrics.stat().st_size > 0:
        raise ConfigError(
            f"job.dump_folder = {str(folder)!r} holds the metrics of a run in {metrics.name}, which this run "
            f"would replace ({because}); choose another folder, or move the old one away"
        )


def interrupted_after(folder: Path) -> int | None:
    """Return the last step of a run that a kill ended before its first checkpoint was complete, else None.

    Such a run has nothing to resume from, and begins again. A run without ``checkpoint.enable``, a finished run and a
    run that must have saved are results. A seed checkpoint, ``step-0``, says nothing. Call it before
    ``clear_leftovers``: parts of a checkpoint may be all that tells such a run from one that has saved.
    """
    try:
        config = read_toml(folder / CONFIG_FILE)
        saving, training = config.get("checkpoint", {}), config.get("training", {})
        interval, steps = saving.get("interval", CHECKPOINT_INTERVAL), training.get("steps", STEPS)
        checkpoints = folder / saving.get("folder", CHECKPOINT_FOLDER)
        metrics = (folder / METRICS_FILE).read_text(encoding="utf-8")
        rows = metrics[: metrics.rfind("\n") + 1].splitlines()  # without a row that the kill has cut
        first, last = (parse(row)["step"] for row in (rows[0], rows[-1]))
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None  # not the files of a run of ours, or damaged
    has_saved = any(path.name != "step-0" for path in checkpoints.glob("step-*"))
    if not saving.get("enable") or saving.get("load_only") or has_saved:
        return None
    # A run that goes on from another run's step logs its own steps only.
    is_early = last < steps and last <= math.ceil(first / interval) * interval
    return last if is_early or (checkpoints / SAVING).is_dir() else None
