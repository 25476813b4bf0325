"""``mxtrain doctor``: this machine and the modes that run on it, or what a config's model takes."""

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version

import mxtrain

PACKAGES = ("torch", "torchtitan", "torchao", "triton", "wandb")
_NOT_TESTED = "; not tested"


def add(commands) -> None:
    """Add the command to argparse's subcommands."""
    parser = commands.add_parser(
        "doctor",
        help="show this machine's versions, devices and execution modes, or a config's model",
        description="""\
Print versions, devices, and which execution modes run on this machine, which mode = "auto" takes, and why.

  mxtrain doctor
  mxtrain doctor --model CONFIG --mxnorm.p 1   a config's parameters, memory per GPU, multiplications, conversion
""",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        nargs=argparse.REMAINDER,  # the flags follow, which argparse does not know
        help="print only what the model of a TOML file takes; any flags of 'mxtrain train' follow",
    )


def _doctor(options) -> int:
    if options.model is not None:
        from mxtrain.cli import doctor_model  # takes seconds

        print(doctor_model.report(options.model))
        return 0
    from mxtrain.analysis.tables import titled
    from mxtrain.ops.hardware import default_device_type, describe_modes, resolve_mode

    print(titled("versions", versions()), titled("devices", devices()), sep="\n\n", end="\n\n")
    modes = [("auto", f"{resolve_mode('auto')} on {default_device_type()}, whatever the recipe")]
    modes += [(mode, f"{'yes' if available else 'no'}: {reason}") for mode, available, reason in describe_modes()]
    print(titled("execution modes", modes))
    return 0


def versions() -> list[tuple[str, str]]:
    """Return (name, version) of Python, mxtrain, its main dependencies, PyTorch's CUDA and the C compiler."""
    import torch

    rows = [("python", platform.python_version()), ("mxtrain", mxtrain.__version__)]
    rows += [(name, package_version(name)) for name in PACKAGES]
    rows.append(("CUDA", torch.version.cuda or "none: a CPU build of PyTorch"))
    rows.append(("C compiler", shutil.which("cc") or shutil.which("gcc") or "none: torch.compile and Triton need one"))
    return rows


def devices() -> list[tuple[str, str]]:
    """Return (device, description) of the CPU and of every GPU, GPUs that PyTorch cannot use included."""
    import torch

    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows = [("cpu", f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, {memory:.0f} GiB")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        rows.append((f"cuda:{index}", f"{gpu.name}, {capability}, {gpu.total_memory / 2**30:.0f} GiB"))
    if len(rows) == 1:
        why = f"PyTorch {torch.__version__} sees no GPU; check its CUDA build and the driver's version"
        rows += [("unused", f"{name}: {why}") for name in nvidia_gpus()]
    return rows


def warn_of_untested_packages() -> None:
    """Print the lines of ``mxtrain doctor`` about untested versions. A wheel cannot tie PyTorch to its TorchTitan."""
    for name in PACKAGES:
        if _NOT_TESTED in (text := package_version(name)):
            print(f"mxtrain: warning: {name} {text}", file=sys.stderr, flush=True)


def package_version(name: str) -> str:
    """Return a package's version, and what to install instead if mxtrain was not tested with it."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return "not installed"
    tested = _tested()
    if name in tested and not tested[name].contains(found, prereleases=True):
        beside = "" if name == "torchtitan" else f" beside torchtitan {version('torchtitan')}"
        return f"{found}{_NOT_TESTED}{beside}: pip install '{name}{tested[name]}'"
    return f"{found}, which goes with torch{tested['torch']}" if name == "torchtitan" and "torch" in tested else found


def _tested() -> dict:
    """Package -> the versions that mxtrain was tested with beside the installed TorchTitan; empty if unknown."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires("mxtrain") or []]
        extra = "titan02" if version("torchtitan").startswith("0.2.") else "titan03"
    except PackageNotFoundError:  # no TorchTitan, or mxtrain is a checkout on PYTHONPATH
        return {}
    # An extra comes last, and says more than the dependencies.
    return {
        each.name: each.specifier for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})
    }


def nvidia_gpus() -> list[str]:
    """Return the names of the GPUs that ``nvidia-smi -L`` lists. Empty if CUDA_VISIBLE_DEVICES hides all GPUs."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0") in ("", "-1"):
        return []
    try:
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return re.findall(r"^GPU \d+: (.*?)(?: \(UUID.*)?$", listing.stdout, flags=re.MULTILINE)
