"""``mxtrain doctor``: this machine and the modes that run on it, or what a config's model takes."""

import argparse
import math
import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, requires, version

import mxtrain
from mxtrain.cli.console import hide_library_warnings
from mxtrain.errors import ConfigError

PACKAGES = ("torch", "torchtitan", "torchao", "triton", "wandb")
_NOT_TESTED = "; not tested"


def add(commands) -> None:
    parser = commands.add_parser(
        "doctor",
        help="show what this machine runs, or what the model of a config takes",
        description="""\
Print versions, devices, and the execution modes that run on this machine, which of them mode = "auto" takes, and why.

  mxtrain doctor
  mxtrain doctor --model CONFIG --mxnorm.p 1   a config's parameters, memory and conversion
""",
    )
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--model",
        metavar="CONFIG",
        nargs=argparse.REMAINDER,  # the flags follow, which argparse does not know
        help="print only what the model of CONFIG takes; flags of 'mxtrain train' may follow",
    )


def _doctor(options) -> int:
    if options.model is not None:
        if not options.model or options.model[0].startswith("-"):
            raise ConfigError("--model needs a CONFIG: name a TOML file or a preset, and write any flags after it")
        hide_library_warnings()
        from mxtrain.settings.read import places

        config, *flags = options.model
        words = [f"--job.config_file={config}", *flags]
        with places(words):
            print(*_model_report(words), sep="\n\n")
        return 0
    from mxtrain.analysis.tables import titled
    from mxtrain.formats.hardware import default_device_type, describe_modes, resolve_mode

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


def _model_report(words: list[str]) -> Iterator[str]:
    """Yield the sections of the report on a job's model, which is built on the meta device, without its memory."""
    from mxtrain.analysis.tables import titled
    from mxtrain.conversion.survey import find_weights
    from mxtrain.parallel.fsdp_gather import gathered_bytes
    from mxtrain.settings.fields import raise_first
    from mxtrain.settings.machine import layout_problems, pipeline_problems, process_count, shards_of
    from mxtrain.settings.mxnorm_section import schedule_in
    from mxtrain.settings.read import read_settings
    from mxtrain.titan.converters import convert_on_meta
    from mxtrain.titan.job_config import check_model, check_model_layout
    from mxtrain.titan.muon import NAME, is_matrix
    from mxtrain.titan.releases import engine

    settings = read_settings(words)
    on_this_machine = settings.replaced({"mxnorm.mode": "auto"})  # which may lack the mode of the training
    check_model(on_this_machine.values)
    if settings["mxnorm.mode"] != "fp8_merged":  # the only mode that changes what is converted
        settings = on_this_machine
    job_config = settings.values
    raise_first(pipeline_problems(settings), settings)
    check_model_layout(settings)
    processes = process_count({"NGPU": os.environ.get("NGPU") or str(_fewest_processes(job_config.parallelism))}, 0)
    raise_first(layout_problems(settings, processes), settings)
    model, name = engine().build_on_meta(job_config), job_config.model.name
    modules = {engine().saved_name(fqn): module for fqn, module in model.named_modules()}
    weights, total = find_weights(modules), sum(p.numel() for p in model.parameters())  # a tied weight counts once
    outer = {p: p.numel() for part in {"tok_embeddings", "output"} & modules.keys() for p in modules[part].parameters()}
    idle = sum(math.prod(weight.shape) * (1 - weight.share) for weight in weights.values())
    rows = [("parameters", f"{total:,}"), ("without embedding, head", f"{total - sum(outer.values()):,}")]
    rows += [("used by one token", f"{round(total - idle):,}")] if idle else []
    size = 4 if job_config.training.dtype == "float32" else 2
    optimizer = job_config.optimizer.name
    by_muon = sum(p.numel() for fqn, p in model.named_parameters() if optimizer == NAME and is_matrix(fqn, p))
    gib = (4 * total - by_muon) * size / 2**30  # AdamW keeps two states for each weight, Muon one
    rows.append(("memory", f"{gib:,.1f} GiB of weights, gradients and {optimizer} states, which FSDP shards"))
    yield titled(f"{name} {job_config.model.flavor}", rows)
    plans = convert_on_meta(job_config, model)
    layout, named = job_config.parallelism, {engine().saved_name(fqn): p for fqn, p in model.named_parameters()}
    shards = shards_of(settings, processes) * layout.context_parallel_degree
    number = f"{shards} shards"
    if layout.data_parallel_shard_degree == -1 and not os.environ.get("NGPU"):
        number = f"{number}, the fewest" if shards > 1 else "shards of whole tiles"
        number, shards = f"{number} (NGPU is unset)", shards if shards > 1 else 0
    size = 2 if job_config.training.mixed_precision_param == "bfloat16" else 4
    plain, codes = gathered_bytes(model, named, size, shards, layout)
    if sum(codes) < sum(plain):
        text = "{:,.1f} (forward {:,.2f}, backward {:,.2f}, fp32 gradients {:,.2f})"
        plain, codes = (text.format(*(size / 2**30 for size in (sum(sizes), *sizes))) for sizes in (plain, codes))
        title = f"GiB that FSDP sends per process and local batch, {number}"
        title += ", mean of the stages" * (layout.pipeline_parallel_degree > 1) + ", by mxnorm.fsdp_gather"
        yield titled(title, [("high_precision", plain), ("quantized", codes)])
    for name, plan in plans.items():
        if plan is None:
            yield f"{name}\n  left out here: not a converter of mxtrain; what it changes is not in these numbers"
        else:
            yield str(plan)
    if entries := schedule_in(job_config):
        yield "\n".join(["precision schedule", *(f"  {entry} ({entry.name})" for entry in entries)])


def _fewest_processes(parallelism) -> int:
    context_tensor = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
    experts = parallelism.expert_parallel_degree * parallelism.expert_tensor_parallel_degree
    shards = parallelism.data_parallel_shard_degree
    if shards == -1:
        shards = experts // math.gcd(experts, context_tensor)
    replicas, pipeline = parallelism.data_parallel_replicate_degree, parallelism.pipeline_parallel_degree
    return shards * replicas * pipeline * context_tensor
