"""``mxtrain train``: check the settings, make the run's folder, and start one worker per accelerator."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from mxtrain.cli.workers import run_workers
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import let_memory_segments_grow
from mxtrain.run_folder.files import METRICS_FILE
from mxtrain.run_folder.lock import locked
from mxtrain.run_folder.start import CheckpointSettings, find_start, require_folder
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import config_file as named_config
from mxtrain.settings.read import places, read_settings
from mxtrain.settings.resume import check_resume

DRIVER_FILES = ("/dev/nvidiactl", "/dev/kfd", "/dev/dxg")
"""Of which a machine with a GPU has one: NVIDIA's driver, AMD's, or Windows's under WSL"""


def train(config_file: str, flags: list[str], worker_flags: Sequence[str] = ()) -> int:
    """Train with the settings of ``config_file`` and ``flags``, and return the exit status.

    The run's folder is ``job.dump_folder`` from the flags or the config, else a new folder.

    Args:
        flags: TorchTitan's flags.
        worker_flags: other flags for the workers.

    Returns:
        0 for success, 2 for a mistake in the settings that a worker found, 1 for another failure of a worker, and
        128 + n for a stop by signal n.

    Raises:
        ConfigError: for mistakes found before any worker starts: in the config file, NGPU or the run's folder.
    """
    if named_config(flags) is not None:
        raise ConfigError("--job.config_file: the first argument of 'mxtrain train' already names the config")
    requested = requested_processes(os.environ)
    arguments = [f"--job.config_file={config_file}", *flags]
    settings = read_settings(arguments)
    devices = accelerator_count()
    processes = process_count(requested, devices)
    from mxtrain.titan.check_job import check_job  # takes seconds, and a mistake in a value is found before

    with places(arguments):
        check_job(settings, Machine(processes, devices > 0))

    folder, made = make_run_folder(config_file, settings.given.get("job.dump_folder"))
    with locked(folder) as warning:
        if warning:
            print(f"mxtrain: warning: {warning}", file=sys.stderr, flush=True)
        try:
            with places(arguments):
                start = find_start(folder, CheckpointSettings.of(settings.section("checkpoint")), processes)
                check_resume(start, settings, processes)
            print(f"mxtrain: run folder {folder}", flush=True)
            set_worker_defaults(os.environ, processes, devices)
            worker_arguments = [*arguments, "--job.dump_folder", str(folder), *worker_flags]
            status = run_workers(worker_arguments, processes, folder)
        except ConfigError:
            _remove_if_unused(folder, made)
            raise
        if status == CONFIG_ERROR_STATUS:
            _remove_if_unused(folder, made)
    return status


def _remove_if_unused(folder: Path, made: list[Path]) -> None:
    """Remove what was made for a run that a mistake in the settings stopped."""
    if not made or (folder / METRICS_FILE).exists():
        return
    shutil.rmtree(folder)
    with suppress(OSError):  # another run may have come into a parent meanwhile
        for parent in made[1:]:
            parent.rmdir()


def requested_processes(environment) -> int | None:
    """Return NGPU as a positive integer, or None if unset or empty. Raises ConfigError for anything else."""
    text = environment.get("NGPU", "")
    if not text:
        return None
    if not re.fullmatch(r"[0-9]+", text) or int(text) == 0:
        raise ConfigError(f"NGPU = {text!r} is not a number of processes: 1, 2, ...")
    return int(text)


def process_count(requested: int | None, devices: int) -> int:
    """Return the number of workers: as requested, else one per accelerator, or one on a CPU.

    Raises ConfigError for more workers than accelerators.
    """
    if requested is None:
        return max(devices, 1)
    if 0 < devices < requested:
        raise ConfigError(f"NGPU = {requested} is more than the {devices} accelerators that PyTorch sees")
    return requested


def accelerator_count() -> int:
    """Count the accelerators that PyTorch can use.

    Warns about NVIDIA GPUs that PyTorch cannot use: training would silently run on the CPU.
    """
    if not any(map(os.path.exists, DRIVER_FILES)):
        return 0  # saves the slow import of PyTorch
    import torch  # the workers will see the same devices

    count = torch.cuda.device_count()
    if count == 0 and nvidia_gpus():
        print(
            f"mxtrain: warning: this machine has {len(nvidia_gpus())} NVIDIA GPU(s), but PyTorch {torch.__version__} "
            "sees none: training runs on the CPU (see 'mxtrain doctor')",
            file=sys.stderr,
        )
    return count


def nvidia_gpus() -> list[str]:
    """Return the names of the GPUs that ``nvidia-smi -L`` lists. Empty if CUDA_VISIBLE_DEVICES hides all GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listing.stdout, flags=re.MULTILINE)


def make_run_folder(config_file: str, wanted: object) -> tuple[Path, list[Path]]:
    """Create the run's folder, and return the folder and what was made: nothing, or it and its missing parents.

    Without ``wanted`` the folder is ``outputs/<config>-<time>``, followed by a number if that name is taken.
    """
    try:
        if wanted is not None:
            folder = require_folder(wanted)
            made = _missing(folder)
            folder.mkdir(parents=True, exist_ok=not made)
            return folder, made
        base = Path("outputs") / f"{Path(config_file).stem}-{datetime.now():%Y%m%d-%H%M%S}"
        for attempt in range(1, 100):
            folder = base if attempt == 1 else base.with_name(f"{base.name}-{attempt}")
            made = _missing(folder)
            base.parent.mkdir(exist_ok=True)
            try:
                folder.mkdir()
                return folder, made
            except FileExistsError:
                continue
        raise ConfigError(f"job.dump_folder: there are already 99 folders named {str(base)!r}; choose another name")
    except OSError as error:
        raise ConfigError(f"job.dump_folder = {error.filename!r} cannot be created: {_what_is_there(error)}") from error


def _what_is_there(error: OSError) -> str:
    path = Path(error.filename)
    if path.is_symlink() and not path.exists():
        return f"it is a link to {os.readlink(path)!r}, which does not exist"
    return "it is a file" if path.is_file() else error.strerror


def _missing(folder: Path) -> list[Path]:
    """The folder and those of its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.is_dir()]


def core_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_worker_defaults(environment, processes: int, devices: int) -> None:
    """Set defaults in the workers' environment. Variables that the user has set stay.

    Several workers share the cores equally.

    On a GPU, memory segments may grow.

    On a CPU, waiting threads sleep early. By default OpenMP spins for milliseconds, and training is several times
    slower when another process needs a core. Measured on two cores: 2,000 tokens/s alone and 150 beside another
    process by default, 1,900 and 900 with 1,000 spins.
    """
    if processes > 1:
        environment.setdefault("OMP_NUM_THREADS", str(max(1, core_count() // processes)))
    if devices == 0:
        environment.setdefault("GOMP_SPINCOUNT", "1000")
    else:
        let_memory_segments_grow(environment)
