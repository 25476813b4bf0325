"""``mxtrain doctor --nccl``: do the processes of a training find one another, and how fast do they exchange data?

``torchrun`` starts it on all nodes; alone, it starts the processes of this machine. GPUs use NCCL, CPUs gloo.
"""

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist

from mxtrain import ranks
from mxtrain.analysis.tables import aligned, titled
from mxtrain.checkpoints.manifest import package_versions
from mxtrain.cli.launch import accelerator_count, process_count, worker_environment
from mxtrain.cli.workers import Workers, stop_signals_to
from mxtrain.errors import CONFIG_ERROR_STATUS, ConfigError
from mxtrain.launched import end_with_launcher, import_flags
from mxtrain.ranks import CommonError, is_first, is_first_of_node, run_on_all_ranks, this_node
from mxtrain.settings.read import read_settings

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter")
SIZES = {"nccl": (2**20, 2**25, 2**29), "gloo": (2**16, 2**20, 2**23)}
"""Bytes of the longer one of input and output, as nccl-tests counts them"""
REPETITIONS = 5
GRACE_SECONDS = 2.0
"""How long other ranks outlive a failure: a launcher kills all when one ends, and rank 0 prints the verdict"""


def check(words: list[str], timeout: float) -> int:
    """Print versions, how fast processes exchange data, and a verdict as the last line.

    Args:
        words: empty, or a config and flags of ``mxtrain train``, whose settings all processes compare.
        timeout: seconds in which all processes have to come, and each collective has to end.

    Returns 0 if all is right, 1 if not, and 2 for a mistake in the settings. Raises ConfigError for a single process.
    """
    if "RANK" not in os.environ:
        return _start_processes(["doctor", "--timeout", str(timeout), "--nccl", *words])
    end_with_launcher()
    ranks.PATIENCE_SECONDS = timeout
    try:
        return _end(0, f"passed: {_checked(words, timeout)}")
    except CommonError as error:
        return _end(CONFIG_ERROR_STATUS, f"mxtrain: error: {error}")
    except (RuntimeError, TimeoutError) as error:
        return _end(1, f"failed: {error}")


def _start_processes(arguments: list[str]) -> int:
    """Run the command in one process per GPU, or in two on a CPU, and return the exit status."""
    devices = accelerator_count()
    processes = process_count(os.environ if devices else {"NGPU": "2", **os.environ}, devices)
    if processes == 1:
        raise ConfigError("--nccl: one process exchanges nothing; start it by torchrun on all nodes, or set NGPU")
    with TemporaryDirectory(prefix="mxtrain-") as logs:
        workers = Workers([sys.executable, *import_flags(), "-m", "mxtrain.cli", *arguments], Path(logs))
        with stop_signals_to(workers.handle), ExitStack() as stack:
            workers.start(processes, worker_environment(os.environ, processes, devices), stack)
            failed = workers.wait()
        if not failed or failed.get(0, 0) > 0:  # it has said why
            return failed.get(0, 0)
        return workers.report(failed, "the check")


def _end(status: int, verdict: str, is_only_here: bool = False) -> int:
    """Print the verdict on one line, after a failure on every node: rank 0 may not have come. Return the status."""
    if is_first() or is_only_here or (status and is_first_of_node()):
        print(" ".join(verdict.split()), file=sys.stderr if status == CONFIG_ERROR_STATUS else sys.stdout, flush=True)
    time.sleep(GRACE_SECONDS if status and not is_first() else 0)
    return status


def _checked(words: list[str], timeout: float) -> str:
    """Print tables and return what has passed. Raises CommonError, RuntimeError or TimeoutError on all ranks if not."""
    everyone = run_on_all_ranks(lambda: _facts(words))
    nodes, facts = [each["node"] for each in everyone], [each["result"] for each in everyone]
    count, config = len(set(nodes)), " ".join(words) or "none is compared"
    if is_first():
        rows = [("processes", f"{len(nodes)} on {', '.join(dict.fromkeys(nodes))}"), ("config", config)]
        print(titled("check", [*rows, *facts[0]["versions"].items()]), end="\n\n", flush=True)
    if problem := difference(nodes, facts):
        raise RuntimeError(problem)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    rows, sizes = [], SIZES[backend]
    for scope, groups in scopes(nodes).items():
        measured = run_on_all_ranks(lambda s=scope, g=groups: _seconds(s, g, sizes, timeout))
        rows += bandwidths(scope, groups, nodes, sizes, [each["result"] for each in measured])
    if is_first():
        header = ("GB/s on the bus", "", *(f"{size / 2**20:g} MiB" for size in sizes), "slowest")
        print(aligned([header, *rows]), end="\n\n", flush=True)
    dist.destroy_process_group()
    return f"{len(nodes)} processes on {count} node{'s' * (count > 1)} have the same versions, and exact sums"


def _facts(words: list[str]) -> dict:
    """Return what this process tells the others. Raises ConfigError for settings, RuntimeError if it has no GPU."""
    given = read_settings([f"--job.config_file={words[0]}", *words[1:]]).given if words else {}
    settings = {name: repr(value) for name, value in given.items() if name != "job.config_file"}
    versions = {name: str(release) for name, release in package_versions().items()}
    index, devices = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    if devices == 0:
        return {"versions": {**versions, "device": "CPU", "backend": "gloo"}, "settings": settings, "gpu": None}
    if index >= devices:
        raise RuntimeError(f"process {index} of the node has no GPU of its own: PyTorch sees {devices}")
    gpu, nccl = torch.cuda.get_device_properties(index), ".".join(map(str, torch.cuda.nccl.version()))
    versions |= {"CUDA": torch.version.cuda, "device": gpu.name, "backend": f"NCCL {nccl}"}
    return {"versions": versions, "settings": settings, "gpu": str(gpu.uuid)}


def difference(nodes: list[str], facts: list[dict]) -> str | None:
    """Return why ranks on these nodes, with facts as ``_facts`` returns them, cannot train together. None: they can."""
    owners, first = {}, facts[0]["versions"] | facts[0]["settings"]
    for rank, (node, fact) in enumerate(zip(nodes, facts, strict=True)):
        for name in first | (own := fact["versions"] | fact["settings"]):
            if (here := own.get(name, "unset")) != (there := first.get(name, "unset")):
                return f"{name} is {here} on rank {rank} ({node}), but {there} on rank 0 ({nodes[0]})"
        if fact["gpu"] and (owner := owners.setdefault(fact["gpu"], rank)) != rank:
            return f"ranks {owner} and {rank} ({node}) have the same GPU"
    return None


def scopes(nodes: list[str]) -> dict[str, list[list[int]]]:
    """Return name -> groups of ranks that exchange data at once. Between nodes: a rank of each, as replicas of HSDP."""
    within = [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
    found = {"all": [list(range(len(nodes)))], "within a node": within, "between nodes": [*map(list, zip(*within))]}
    found = {name: [group for group in groups if len(group) > 1] for name, groups in found.items()}
    return {name: groups for name, groups in found.items() if name == "all" or groups and groups != found["all"]}


def values(rank: int, count: int, device: torch.device) -> torch.Tensor:
    """Return what a rank contributes, fp32: integers below 1009, whose sum over 16,000 ranks is exact in any order."""
    return torch.arange(count, dtype=torch.int32, device=device).add_(31 * rank).remainder_(1009).float()


def prepared(name: str, members: list[int], group, count: int, device) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    """Return a function that runs a collective, its result, and what the result has to be after the first run.

    ``count``: elements of the longer one of input and output; the remainder by the members is left out.
    """
    rank, part = dist.get_rank(), count // len(members)
    whole, first = part * len(members), part * members.index(rank)
    if name == "all-gather":
        mine, result = values(rank, part, device), torch.empty(whole, device=device)
        expected = torch.cat([values(other, part, device) for other in members])
        return lambda: dist.all_gather_into_tensor(result, mine, group=group), result, expected
    mine, expected = values(rank, whole, device), sum(values(other, whole, device) for other in members)
    if name == "all-reduce":
        return lambda: dist.all_reduce(mine, group=group), mine, expected
    result = torch.empty(part, device=device)
    return lambda: dist.reduce_scatter_tensor(result, mine, group=group), result, expected[first : first + part]


def _seconds(scope: str, groups: list[list[int]], sizes: tuple[int, ...], timeout: float) -> dict | None:
    """Return how long each collective takes in this rank's group, by size; None for a rank in no group.

    Raises RuntimeError for a wrong result. Ends the process if a collective fails, or does not end.
    """
    made = [(members, dist.new_group(members)) for members in groups]  # every rank makes all of them
    members, group = next((each for each in made if dist.get_rank() in each[0]), (None, None))
    if members is None:
        return None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    seconds, problems = {name: [] for name in COLLECTIVES}, []
    for name in COLLECTIVES:
        for size in sizes:
            what = f"{name} of {size / 2**20:g} MiB ({scope})"
            late = f"failed: {what} has not ended after {timeout:g} s on {this_node()}; NCCL_DEBUG=INFO says more"
            timer = threading.Timer(timeout, lambda verdict=late: os._exit(_end(1, verdict)))
            timer.daemon = True
            timer.start()
            try:
                run, result, expected = prepared(name, members, group, size // 4, device)
                run()
                if wrong := int((result != expected).sum()):
                    problems.append(f"{what}: {wrong:,} of {result.numel():,} elements are wrong")
                start = time.perf_counter()
                for _ in range(REPETITIONS):
                    run()
                result[-1].item()  # waits for the GPU
                seconds[name].append((time.perf_counter() - start) / REPETITIONS)
            except RuntimeError as error:  # the others wait in the collective
                os._exit(_end(1, f"failed: {what} on rank {dist.get_rank()}, {this_node()}: {error}", True))
            timer.cancel()
    if problems:  # raised late for the same reason
        raise RuntimeError(problems[0])
    return seconds


def bandwidths(scope: str, groups: list, nodes: list[str], sizes: tuple, seconds: list[dict | None]) -> list[tuple]:
    """Return a row for each collective: bus bandwidth of the slowest group by size, and which group this is.

    Bus bandwidth is that of nccl-tests: bytes of the longer one of input and output by seconds, times (n - 1) / n,
    for all-reduce times 2 (n - 1) / n. It compares with the speed of the links, whatever the number of ranks n.
    """
    rows = []
    for name in COLLECTIVES:
        rates = []
        for group in groups:
            share = (2 if name == "all-reduce" else 1) * (len(group) - 1) / len(group)
            slowest = [max(times) for times in zip(*(seconds[rank][name] for rank in group))]
            rates.append([share * size / 1e9 / time for size, time in zip(sizes, slowest)])
        group = groups[min(range(len(groups)), key=lambda index: rates[index][-1])]
        where = nodes[group[0]] if scope == "within a node" else f"ranks {', '.join(map(str, group[:3]))}, ..."
        rows.append((scope, name, *(f"{min(each):.3g}" for each in zip(*rates)), where if len(groups) > 1 else ""))
    return rows
