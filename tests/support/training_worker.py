"""What one process of a test's runs does (see training_runs): it trains one model after another."""

import atexit
import json
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True)
class Resumed:
    """Resume a copy of a run."""

    run: str
    step: int
    """The copy has no later checkpoints"""
    flags: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Configured:
    """Train with a config of the run's own."""

    config: dict
    flags: list[str]


Runs = dict[str, list[str] | Resumed | Configured]
"""Name -> flags, what to resume, or a config and flags"""


def free_port() -> str:
    """Return a port below those that systems give out by themselves, one of which could be taken before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), k=100):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return str(port)
    raise AssertionError("no port of 100 is free")


def _agree_on_port(folder: Path, is_first: bool) -> str:
    """Return a free port. The first rank chooses it when the run begins: another process may take one that waits."""
    file = folder / "port"
    if is_first:
        (folder / "port being written").write_text(free_port())
        (folder / "port being written").rename(file)
    while not file.exists():
        time.sleep(0.01)
    return file.read_text()


def _copy_to_resume(folder: Path, name: str, resumed: Resumed, is_first: bool) -> None:
    """Copy a run for another one to resume. Returns as soon as the copy is there."""
    copy = folder / name
    if is_first:
        part = folder / f"{name} (being copied)"
        # Other ranks would take the port, and a status stands for a rank that is done.
        shutil.copytree(folder / resumed.run, part, ignore=shutil.ignore_patterns("port", "rank*.status"))
        for checkpoint in (part / "checkpoint").glob("step-*"):
            if int(checkpoint.name.removeprefix("step-")) > resumed.step:
                shutil.rmtree(checkpoint)
        part.rename(copy)
    while not copy.exists():
        time.sleep(0.01)


def _begin_after_first(begin: Callable, *args, **kwargs) -> None:
    """Join the process group when rank 0 listens: PyTorch tries again only after half a second."""
    end = time.monotonic() + 60
    while time.monotonic() < end:
        with socket.socket() as probe:
            if probe.connect_ex((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))) == 0:
                break
        time.sleep(0.005)
    return begin(*args, **kwargs)


def _sleep(sleep: Callable, rank: str, statuses: list[Path], seconds: float) -> None:
    """Sleep for half a second at most. When TorchTitan's first rank wants to for longer, until all others are done.

    That is at the end of training, so that the others can complete. Once it left at once, and a thread of gloo crashed.
    """
    if rank != "0" or seconds < 2:
        return sleep(min(seconds, 0.5))
    end = time.monotonic() + seconds
    while time.monotonic() < end and not all(status.exists() for status in statuses):
        sleep(0.005)


def train_all(folder: Path, runs: Runs, environment: dict[str, str], prepare: Callable[[], None] | None) -> None:
    """What ``python -m mxtrain.train`` does, once for every run."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(REPOSITORY)
    sys.path.insert(0, str(REPOSITORY))
    import torch
    from torch.distributed.tensor import debug

    import mxtrain.titan.train
    from mxtrain.analysis import tables
    from mxtrain.cli.console import hide_library_warnings, take_verbose
    from tests.support.cpu_layouts import use_layouts_on_a_cpu

    hide_library_warnings()
    tables.plot = lambda runs, path: path  # a picture takes longer than a step
    add_tiny_models()
    use_layouts_on_a_cpu()
    if prepare is not None:
        prepare()
    rank = environment["RANK"]
    sleep = time.sleep
    if rank != "0":
        meet = torch.distributed.rendezvous
        torch.distributed.rendezvous = partial(_begin_after_first, meet)
    for name, flags in runs.items():
        os.environ.clear()  # of what TorchTitan set in the run before
        os.environ.update(environment)
        own = [f"--job.config_file={folder / 'job.toml'}", f"--job.dump_folder={folder / name}"]
        if isinstance(flags, Resumed):
            _copy_to_resume(folder, name, flags, is_first=rank == "0")
            own, flags = ["--resume", str(folder / name)], flags.flags
        elif isinstance(flags, Configured):
            own[0], flags = f"--job.config_file={folder / name / 'job.toml'}", flags.flags
        os.environ["MASTER_PORT"] = _agree_on_port(folder / name, rank == "0")
        statuses = [folder / name / f"rank{other}.status" for other in range(1, int(environment["WORLD_SIZE"]))]
        time.sleep = partial(_sleep, sleep, rank, statuses)
        with open(folder / name / f"rank{rank}.txt", "w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        status = 1
        debug._clear_sharding_prop_cache()  # PyTorch keeps meshes of the run before in it
        verbose, flags = take_verbose(flags)
        try:
            sys.exit(mxtrain.titan.train.work([*own, *flags], verbose))
        except SystemExit as exit:
            status = exit.code
        finally:
            (folder / name / f"rank{rank}.status").write_text(json.dumps(status))
    atexit._run_exitfuncs()  # a forked process would end without them


def add_tiny_models() -> None:
    """Add the flavor "tiny" to every model: two layers, one of them dense where the others are experts."""
    from mxtrain.titan.releases import RELEASE

    few_heads = {"dim": 128, "n_layers": 2, "n_heads": 4}
    # Feed-forward layers of 384 features, of which a quarter still holds whole blocks.
    latent = {"moe_inter_dim": 64, "kv_lora_rank": 64, "qk_nope_head_dim": 32, "v_head_dim": 32, "qk_rope_head_dim": 16}
    qwen3 = {**few_heads, "head_dim": 32, "n_kv_heads": 2, "moe_inter_dim": 64}
    if RELEASE == "v03":
        from mxtrain.titan.v03.models import FLAVORS

        debug = {"llama3": "debugmodel", "deepseek_v3": "debugmodel", "qwen3": "debugmodel_moe_16"}
        sizes = {"llama3": {**few_heads, "hidden_dim": 384}, "deepseek_v3": {**few_heads, **latent, "hidden_dim": 256}}
        for name, flavor in debug.items():
            FLAVORS[name]["tiny"] = {**FLAVORS[name][flavor], **sizes.get(name, qwen3)}
        return
    from torchtitan.protocols.train_spec import get_train_spec

    debug = {name: get_train_spec(name).model_args for name in ("llama3", "llama4", "deepseek_v3", "qwen3")}
    tiny = {
        "llama3": replace(debug["llama3"]["debugmodel"], **few_heads, multiple_of=128),
        "llama4": replace(debug["llama4"]["debugmodel"], **few_heads, multiple_of=32),
        "deepseek_v3": replace(debug["deepseek_v3"]["debugmodel"], **few_heads, **latent, inter_dim=256),
        "qwen3": replace(debug["qwen3"]["debugmodel_moe_16"], **qwen3, hidden_dim=256),
    }
    for name, args in tiny.items():
        debug[name]["tiny"] = args
