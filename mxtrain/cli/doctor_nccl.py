"""``mxtrain doctor --nccl``: do the processes of a training find one another, and how fast do they exchange data?

``torchrun`` starts it on all nodes; alone, it starts the processes of this machine. GPUs use NCCL, CPUs gloo.
"""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
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
    """Check the processes; print their versions, how fast they exchange data, and a verdict as the last line.

    Args:
        words: empty, or a config and flags of ``mxtrain train``, whose settings all processes compare.
        timeout: seconds after which a process that does not come, or a collective that does not end, is an error.

    Returns:
        0 if all is right, 1 if not, and 2 for a mistake in the settings.

    Raises:
        ConfigError: as ``read_settings``; or there is only one process.
    """
    if "RANK" not in os.environ:
        return _start_processes(["doctor", "--timeout", str(timeout), "--nccl", *words])
    end_with_launcher()
    ranks.PATIENCE_SECONDS = timeout
    try:
        print_first(f"passed: {_checked(words, timeout)}")
        return 0
    except CommonError as error:
        print(f"mxtrain: error: {error}" * is_first_of_node(), file=sys.stderr, flush=True)
        status = CONFIG_ERROR_STATUS
    except (RuntimeError, TimeoutError) as error:
        print_failure(str(error))
        status = 1
    time.sleep(0 if is_first() else GRACE_SECONDS)
    return status


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
        if failed.get(0, -1) > 0:  # it has said why
            return failed[0]
        return workers.report(failed, "the check") if failed else 0


def print_first(text: str) -> None:
    """Print a text on rank 0."""
    if is_first():
        print(text, flush=True)


def print_failure(text: str) -> None:
    """Print the verdict, one line, on every node: rank 0 may not have come."""
    if is_first_of_node():
        print(f"failed: {' '.join(text.split())}", flush=True)


def _checked(words: list[str], timeout: float) -> str:
    """Check this process together with the others, print tables, and return what has passed.

    Raises CommonError, RuntimeError or TimeoutError for what is wrong, on all ranks.
    """
    everyone = run_on_all_ranks(lambda: _facts(words))
    nodes, facts = [each["node"] for each in everyone], [each["result"] for each in everyone]
    print_first(titled("processes", _described(nodes, facts)) + "\n")
    if problem := difference(nodes, facts):
        raise RuntimeError(problem)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if backend == "nccl":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    rows = [("GB/s on the bus", "", *(f"{size / 2**20:g} MiB" for size in SIZES[backend]), "slowest")]
    for scope, groups in scopes(nodes).items():
        measured = run_on_all_ranks(lambda s=scope, g=groups: _seconds(s, g, SIZES[backend], timeout))
        rows += bandwidths(scope, groups, nodes, SIZES[backend], [each["result"] for each in measured])
    print_first(aligned(rows) + "\n")
    dist.destroy_process_group()
    count = len(set(nodes))
    return f"{len(nodes)} processes on {count} node{'s' * (count > 1)} have the same versions, and exact sums"


def _facts(words: list[str]) -> dict:
    """Return what this process tells the others. Raises ConfigError for settings, RuntimeError if it has no GPU."""
    given = read_settings([f"--job.config_file={words[0]}", *words[1:]]).given if words else {}
    same = {**package_versions(), "CUDA": torch.version.cuda, "device": "CPU", "backend": "gloo"}
    index, devices, gpu = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count(), None
    if devices:
        if index >= devices:
            raise RuntimeError(f"process {index} of the node has no GPU of its own: PyTorch sees {devices}")
        properties = torch.cuda.get_device_properties(index)
        gpu, same["device"] = str(properties.uuid), properties.name
        same["backend"] = f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}"
    same |= {name: repr(value) for name, value in given.items() if name != "job.config_file"}
    environment = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
    return {"same": same, "gpu": gpu, "config": " ".join(words), "environment": environment}


def _described(nodes: list[str], facts: list[dict]) -> list[tuple[str, str]]:
    first = facts[0]["same"]
    rows = [("processes", ", ".join(f"{nodes.count(node)} on {node}" for node in dict.fromkeys(nodes)))]
    rows += [(name, str(first[name])) for name in (*package_versions(), "CUDA", "device", "backend")]
    rows.append(("config", facts[0]["config"] or "not compared: none is named"))
    for name in sorted({name for fact in facts for name in fact["environment"]}):
        seen = {fact["environment"].get(name, "unset"): node for node, fact in zip(nodes, facts)}  # may differ by node
        rows.append((name, ", ".join(seen if len(seen) == 1 else [f"{value} on {node}" for value, node in seen.items()])))
    return rows


def difference(nodes: list[str], facts: list[dict]) -> str | None:
    """Return why these processes cannot train together; None if they can.

    Args:
        nodes: name of each rank's node.
        facts: of each rank, {"same": what has to be the same, "gpu": its GPU or None}.
    """
    owners, first = {}, facts[0]["same"]
    for rank, (node, fact) in enumerate(zip(nodes, facts, strict=True)):
        for name in first | fact["same"]:
            here, there = fact["same"].get(name, "unset"), first.get(name, "unset")
            if here != there:
                return f"{name} is {here} on rank {rank} ({node}), but {there} on rank 0 ({nodes[0]})"
        if fact["gpu"] and (owner := owners.setdefault(fact["gpu"], rank)) != rank:
            return f"ranks {owner} and {rank} ({node}) have the same GPU"
    return None


def scopes(nodes: list[str]) -> dict[str, list[list[int]]]:
    """Return name -> groups of ranks that exchange data at the same time: all, those of a node, those between nodes.

    The last are the replicas of hybrid sharding: a rank of each node.
    """
    everyone = [list(range(len(nodes)))]
    within = [[rank for rank, other in enumerate(nodes) if other == node] for node in dict.fromkeys(nodes)]
    others = {"within a node": within, "between nodes": [list(group) for group in zip(*within)]}
    return {"all": everyone} | {
        name: [group for group in groups if len(group) > 1]
        for name, groups in others.items()
        if groups != everyone and max(map(len, groups)) > 1
    }


def values(rank: int, first: int, count: int, device: torch.device) -> torch.Tensor:
    """Return elements ``first`` up to ``first + count`` of what a rank contributes, fp32.

    They are integers below 1009: sums over up to 16,000 ranks are exact, in any order.
    """
    places = torch.arange(first, first + count, dtype=torch.int32, device=device)
    return places.add_(31 * rank).remainder_(1009).float()


def prepared(name: str, members: list[int], group, count: int, device) -> tuple[Callable, torch.Tensor, torch.Tensor]:
    """Return a function that runs a collective, its result, and what the result has to be after the first run.

    Args:
        count: elements of the longer one of input and output; the remainder by the members is left out.
    """
    rank, part = dist.get_rank(), count // len(members)
    total, first = part * len(members), part * members.index(rank)
    if name == "all-gather":
        mine, result = values(rank, 0, part, device), torch.empty(total, device=device)
        expected = torch.cat([values(other, 0, part, device) for other in members])
        return lambda: dist.all_gather_into_tensor(result, mine, group=group), result, expected
    mine = values(rank, 0, total, device)
    expected = sum(values(other, 0, total, device) for other in members)
    if name == "all-reduce":
        return lambda: dist.all_reduce(mine, group=group), mine, expected
    result = torch.empty(part, device=device)
    run = lambda: dist.reduce_scatter_tensor(result, mine, group=group)  # noqa: E731
    return run, result, expected[first : first + part]


def _seconds(scope: str, groups: list[list[int]], sizes: tuple[int, ...], timeout: float) -> dict | None:
    """Return how long each collective takes in this rank's group, by size; None for a rank in no group.

    Raises RuntimeError for a wrong result. Ends the process if a collective does not end.
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
            with _deadline(timeout, what):
                run, result, expected = prepared(name, members, group, size // 4, device)
                run()
                if wrong := int((result != expected).sum()):
                    problems.append(f"{what}: {wrong:,} of {result.numel():,} elements are wrong")
                start = time.perf_counter()
                for _ in range(REPETITIONS):
                    run()
                result[-1].item()  # waits for the GPU
                seconds[name].append((time.perf_counter() - start) / REPETITIONS)
    if problems:  # raised late, so that the others do not wait in the next collective
        raise RuntimeError(problems[0])
    return seconds


@contextmanager
def _deadline(seconds: float, what: str) -> Iterator[None]:
    """End this process with a verdict if the context takes longer. Nothing else interrupts a collective."""

    def give_up() -> None:
        print_failure(f"{what} has not ended after {seconds:g} s on {this_node()}; NCCL_DEBUG=INFO says more")
        time.sleep(0 if is_first() else GRACE_SECONDS)
        os._exit(1)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def bandwidths(
    scope: str, groups: list[list[int]], nodes: list[str], sizes: tuple[int, ...], seconds: list[dict | None]
) -> list[tuple[str, ...]]:
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
