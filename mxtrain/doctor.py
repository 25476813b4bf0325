"""``mxtrain doctor``: what this machine has, and how each recipe would run on it."""

import os
import platform
import shutil
from importlib.metadata import PackageNotFoundError, version

import torch

import mxtrain
from mxtrain.hardware import default_device_type, describe_modes, resolve_mode
from mxtrain.launch import nvidia_gpus
from mxtrain.recipe import RECIPES


def report() -> str:
    """The report as text, one section after another."""
    sections = {"versions": versions(), "devices": devices(), "execution modes": modes(), "recipes": recipes()}
    return "\n\n".join(f"{title}\n{_table(rows)}" for title, rows in sections.items())


def versions() -> list[tuple[str, str]]:
    """(name, version) of Python, mxtrain, what it is built on, and the CUDA that PyTorch was built for."""
    rows = [("python", platform.python_version()), ("mxtrain", mxtrain.__version__)]
    rows += [(name, _version(name)) for name in ("torch", "torchtitan", "torchao", "triton", "wandb")]
    rows.append(("CUDA", torch.version.cuda or "none: a CPU build of PyTorch"))
    rows.append(("C compiler", shutil.which("cc") or shutil.which("gcc") or "none: torch.compile and Triton need one"))
    return rows


def devices() -> list[tuple[str, str]]:
    """(device, description) of the CPU and of every GPU, those that PyTorch cannot use included."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows = [("cpu", f"{platform.machine()}, {cores} cores, {memory:.0f} GiB")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        rows.append((f"cuda:{index}", f"{gpu.name}, {capability}, {gpu.total_memory / 2**30:.0f} GiB"))
    if len(rows) == 1:
        why = f"PyTorch {torch.__version__} sees no GPU; is it built for CUDA, and is the driver new enough for it?"
        rows += [("unused", f"{name}: {why}") for name in nvidia_gpus()]
    return rows


def modes() -> list[tuple[str, str]]:
    """(mode, whether it can run here and why) of every execution mode."""
    return [(s.mode, f"{'yes' if s.available else 'no'}: {s.reason}") for s in describe_modes()]


def recipes() -> list[tuple[str, str]]:
    """(recipe, the mode that ``mode = "auto"`` takes here and why) of every recipe."""
    mode = resolve_mode("auto")
    reason = next(s.reason for s in describe_modes() if s.mode == mode)
    return [(name, f"{mode} on {default_device_type()}: {reason}") for name in RECIPES]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _table(rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)
