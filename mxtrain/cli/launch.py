"""``mxtrain train``: check the settings, make the run's folder, and start one worker per accelerator."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from mxtrain.checkpoints.start import require_folder
from mxtrain.cli.versions import warn_of_untested_packages
from mxtrain.cli.workers import run_workers
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import START_VARIABLE
from mxtrain.run_folder import METRICS_FILE, locked
from mxtrain.settings.machine import Machine
from mxtrain.settings.read import config_file as named_config
from mxtrain.settings.read import places, read_settings
from mxtrain.settings.resume import checked_start


def train(config_file: str, flags: list[str], worker_flags: Sequence[str] = ()) -> int:
    """Train with the settings of ``config_file`` and ``flags``, and return the exit status.

    The run's folder is ``job.dump_folder`` from the flags or the config, else a new folder. What is checked here, the
    workers trust.

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
    arguments = [f"--job.config_file={config_file}", *flags]
    settings = read_settings(arguments)
    warn_of_untested_packages()  # before TorchTitan is imported, which may fail beside another PyTorch
    from mxtrain.titan.check_job import check_job  # takes seconds, and a mistake in a value is found before

    with places(arguments):
        devices = accelerator_count()
        processes = process_count(os.environ, devices)
        check_job(settings, Machine(processes, devices > 0))
    folder, made = make_run_folder(config_file, settings.given.get("job.dump_folder"))
    with locked(folder) as warning:
        if warning:
            print(f"mxtrain: warning: {warning}", file=sys.stderr, flush=True)
        status = None
        try:
            with places(arguments):
                start = checked_start(folder, settings, processes)
            print(f"mxtrain: run folder {folder}", flush=True)
            environment = worker_environment(os.environ, processes, devices)
            environment[START_VARIABLE] = json.dumps(start.to_json())
            worker_arguments = [*arguments, "--job.dump_folder", str(folder), *worker_flags]
            status = run_workers(worker_arguments, processes, folder, environment)
        except ConfigError:
            status = CONFIG_ERROR_STATUS
            raise
        finally:
            if status == CONFIG_ERROR_STATUS and made and not (folder / METRICS_FILE).exists():
                # What was made for a run that a mistake stopped goes.
                shutil.rmtree(folder)
                with suppress(OSError):  # another run may have come into a parent meanwhile
                    for parent in made[1:]:
                        parent.rmdir()
    return status


def process_count(environment: Mapping[str, str], devices: int) -> int:
    """Return the number of workers: NGPU if it is set, else one per accelerator, or one on a CPU.

    Raises ConfigError if NGPU is not a positive integer, or more than there are accelerators.
    """
    text = environment.get("NGPU") or str(max(devices, 1))
    if not re.fullmatch(r"0*[1-9][0-9]*", text):
        raise ConfigError(f"NGPU = {text!r} is not a number of processes: 1, 2, ...")
    if 0 < devices < int(text):
        raise ConfigError(f"NGPU = {text} is more than the {devices} accelerators that PyTorch sees")
    return int(text)


def accelerator_count() -> int:
    """Count the accelerators that PyTorch can use.

    Warns about NVIDIA GPUs that PyTorch cannot use: training would silently run on the CPU.
    """
    import torch  # takes a second, after mistakes in the settings have shown

    devices = torch.cuda.device_count()
    if devices == 0 and (gpus := nvidia_gpus()):
        print(
            f"mxtrain: warning: this machine has {len(gpus)} NVIDIA GPU(s), but PyTorch {torch.__version__} sees none: "
            "training runs on the CPU (see 'mxtrain doctor')",
            file=sys.stderr,
        )
    return devices


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
        for number in count(1):
            folder = base if number == 1 else base.with_name(f"{base.name}-{number}")
            made = _missing(folder)
            base.parent.mkdir(exist_ok=True)
            with suppress(FileExistsError):
                folder.mkdir()
                return folder, made
    except OSError as error:
        path, why = Path(error.filename), error.strerror
        if path.is_symlink() and not path.exists():
            why = f"it is a link to {os.readlink(path)!r}, which does not exist"
        elif path.is_file():
            why = "it is a file"
        raise ConfigError(f"job.dump_folder = {error.filename!r} cannot be created: {why}") from error


def _missing(folder: Path) -> list[Path]:
    """Return the folder and those of its parents that do not exist, innermost first."""
    return [path for path in (folder, *folder.parents) if not path.is_dir()]


def core_count() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def worker_environment(environment: Mapping[str, str], processes: int, devices: int) -> dict[str, str]:
    """Return the workers' environment: this one, with defaults for what the user has not set.

    Several workers share the cores equally.

    On a CPU, waiting threads sleep early. By default OpenMP spins for milliseconds, and training is several times
    slower when another process needs a core. Measured on two cores: 2,000 tokens/s alone and 150 beside another
    process by default, 1,900 and 900 with 1,000 spins.
    """
    defaults = {}
    if processes > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, core_count() // processes))
    if devices == 0:
        defaults["GOMP_SPINCOUNT"] = "1000"
    return {**defaults, **environment}
