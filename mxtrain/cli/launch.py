"""``mxtrain train``: check the settings, make the run's folder, and start one worker per accelerator.

``torch.distributed.elastic`` starts the workers, as for ``torchrun``. Only the first one writes to the terminal.
"""

import json
import logging
import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from pathlib import Path

from mxtrain.checkpoints.run_folder import METRICS_FILE, WORKER_LOGS, locked
from mxtrain.checkpoints.start import require_folder
from mxtrain.cli.doctor import nvidia_gpus, warn_of_untested_packages
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.files import reason
from mxtrain.launched import COMPILE_VARIABLE, START_VARIABLE, import_flags, stop_signals
from mxtrain.settings.machine import Machine, process_count
from mxtrain.settings.read import config_file as named_config
from mxtrain.settings.read import places, read_settings
from mxtrain.settings.resume import checked_start

WORKER = "mxtrain.train"
"""Module that every worker runs with ``python -m``"""
IMPATIENT = (signal.SIGINT, signal.SIGTERM)
"""Signals that a person sends again to end a run at once"""
ECHO_SECONDS = 1.0
"""A signal that arrives again within this time is the same: a terminal or Slurm may send one twice"""


def train(config_file: str, flags: list[str], worker_flags: Sequence[str] = ()) -> int:
    """Train with the settings of ``config_file`` and ``flags``, and return the exit status.

    The run's folder is ``job.dump_folder`` from the flags or the config, else a new folder. What is checked here, the
    workers trust. The status is 0 for success, 2 for a mistake in the settings that a worker found, 1 for another
    failure of a worker, and 128 + n for a stop by signal n.
    """
    if named_config(flags) is not None:
        raise ConfigError("--job.config_file is set by the first argument of 'mxtrain train'; leave the flag out")
    arguments = [f"--job.config_file={config_file}", *flags]
    settings = read_settings(arguments)
    warn_of_untested_packages()  # before TorchTitan is imported, which may fail beside another PyTorch
    from mxtrain.titan.job_config import check_job  # takes seconds, and a mistake in a value is found before

    with places(arguments):
        devices = accelerator_count()
        processes = process_count(os.environ, devices)
        check_job(settings, Machine(processes, devices > 0))
    folder, is_new = make_run_folder(config_file, settings.given.get("job.dump_folder"))
    with locked(folder) as warning:
        if warning:
            print(f"mxtrain: warning: {warning}", file=sys.stderr, flush=True)
        status = None
        try:
            with places(arguments):
                start = checked_start(folder, settings, processes)
            print(f"mxtrain: run folder {folder}", flush=True)
            own = {START_VARIABLE: json.dumps(start.to_json()), **worker_defaults(os.environ, processes, devices)}
            if devices and settings["compile.enable"]:
                own[COMPILE_VARIABLE] = "1"
            worker_arguments = [*arguments, "--job.dump_folder", str(folder), *worker_flags]
            status = run_workers(worker_arguments, processes, folder, own)
        except ConfigError:
            status = CONFIG_ERROR_STATUS
            raise
        finally:
            if status == CONFIG_ERROR_STATUS and is_new and not (folder / METRICS_FILE).exists():
                shutil.rmtree(folder)
    return status


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


def make_run_folder(config_file: str, wanted: object) -> tuple[Path, bool]:
    """Create the run's folder, and return the folder and whether it is new.

    Without ``wanted`` the folder is ``outputs/<config>-<time>``, followed by a number if that name is taken.
    """
    name = f"{Path(config_file).stem}-{datetime.now():%Y%m%d-%H%M%S}"
    try:
        if wanted is not None:
            folder = require_folder(wanted)
            is_new = not folder.is_dir()
            folder.mkdir(parents=True, exist_ok=not is_new)
            return folder, is_new
        Path("outputs").mkdir(exist_ok=True)
        for number in count(1):
            folder = Path("outputs", name if number == 1 else f"{name}-{number}")
            with suppress(FileExistsError):
                folder.mkdir()
                return folder, True
    except OSError as error:
        raise ConfigError(f"job.dump_folder = {error.filename!r} cannot be created: {reason(error)}") from error


def worker_defaults(environment: Mapping[str, str], processes: int, devices: int) -> dict[str, str]:
    """Return variables for the workers that the user has not set. Several workers share the cores equally.

    On a CPU, waiting threads sleep early. By default OpenMP spins for milliseconds, and training is several times
    slower when another process needs a core. Measured on two cores: 2,000 tokens/s alone and 150 beside another
    process by default, 1,900 and 900 with 1,000 spins. glibc keeps the memory of freed tensors up to 32 MiB: it would
    give much of it back to the kernel, which clears every page again for the next tensor.
    """
    defaults = {}
    if processes > 1:
        defaults["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // processes))
    if devices == 0:
        defaults |= {
            "GOMP_SPINCOUNT": "1000",
            "MALLOC_MMAP_THRESHOLD_": "33554432",
            "MALLOC_TRIM_THRESHOLD_": "2147483647",
        }
    return {name: value for name, value in defaults.items() if name not in environment}


def run_workers(arguments: list[str], processes: int, folder: Path, environment: dict[str, str]) -> int:
    """Run the workers on this machine until they end, and return the exit status (see ``train``).

    They inherit the variables of this process, to which ``environment`` is added. A stop signal goes on to the
    workers, which save for as long as they need. The agent's own handlers would kill them after 30 seconds.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.rendezvous import RendezvousParameters
    from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

    name, here = f"{datetime.now():%Y%m%d-%H%M%S}", "127.0.0.1"
    meeting = RendezvousParameters("c10d", f"{here}:0", name, min_nodes=1, max_nodes=1, local_addr=here)
    command = (*import_flags(), "-u", "-m", WORKER, *arguments)
    spec = WorkerSpec(
        "worker", processes, get_rendezvous_handler(meeting), entrypoint=sys.executable, args=command, max_restarts=0
    )
    logs = str(folder / WORKER_LOGS) if processes > 1 else os.devnull
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(logs, {rank: Std.ALL for rank in range(1, processes)}))
    times: dict[int, float] = {}

    def handle(number: int, frame: object) -> None:
        """Pass a stop signal on to the workers once, and kill them if a person sends it again."""
        workers = [worker.id for worker in agent.get_worker_group().workers if worker.id is not None]
        if not workers:
            sys.exit(128 + number)
        is_first, now = number not in times, time.monotonic()
        if not is_first and (number not in IMPATIENT or now - times[number] < ECHO_SECONDS):
            return
        if not times:
            name = signal.Signals(number).name
            text = f"mxtrain: {name}: stopping" + f"; a second {name} kills the workers" * (number in IMPATIENT)
            start = "\n" if os.isatty(2) else ""  # after the terminal's ^C
            with suppress(OSError):  # not by print, in the middle of which the interpreter may be
                os.write(2, f"{start}{text}\n".encode())
        times.setdefault(number, now)
        for worker in workers:
            with suppress(ProcessLookupError):  # it has ended
                os.kill(worker, number) if is_first else os.killpg(worker, signal.SIGKILL)

    earlier = {number: signal.signal(number, handle) for number in stop_signals()}
    # The agent keeps one signal.
    os.environ |= {**environment, "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT"}
    logging.disable(logging.ERROR)  # the agent's lines about every worker
    try:
        failures = agent.run().failures
    finally:
        logging.disable(logging.NOTSET)
        for number, before in earlier.items():
            signal.signal(number, before)
    rank, first = min(failures.items(), key=lambda item: item[1].timestamp, default=(0, None))
    if times and (first is None or first.exitcode < 0):
        return 128 + next(iter(times))
    return 0 if first is None else _report(rank, first, processes)


def _report(rank: int, failure, processes: int) -> int:
    """Print one line about the worker that failed first, unless it has done so itself. Return the exit status."""
    error = failure.error_file_data["message"] if rank > 0 else ""
    cause = error["message"] if isinstance(error, dict) else ""
    if failure.exitcode == CONFIG_ERROR_STATUS:
        if cause:
            print(f"mxtrain: error: {cause.removeprefix('ConfigError: ')}", file=sys.stderr, flush=True)
        return CONFIG_ERROR_STATUS
    how = f"exit status {failure.exitcode}" if failure.exitcode > 0 else failure.signal_name()
    if failure.exitcode == -signal.SIGKILL:
        how += ", often for lack of memory"
    who = "the worker" if processes == 1 else f"worker {rank} of {processes}"
    where = f"{cause}; see {Path(failure.error_file).with_name('stderr.log')}" if cause else ""
    print(f"mxtrain: training failed: {who} ended with {how}" + f": {where}" * bool(where), file=sys.stderr, flush=True)
    return 1
