"""What ``mxtrain doctor`` prints: this machine, the modes that run on it, and which kernels a norm or router runs."""

import os
import platform
import shutil
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version

import torch
from packaging.requirements import Requirement

import mxtrain
from mxtrain.cli.launch import core_count, nvidia_gpus
from mxtrain.errors import ConfigError, require_one_of
from mxtrain.ops.hardware import HAS_TRITON, default_device_type, describe_modes, resolve_mode
from mxtrain.recipes.recipe import RECIPES, RMSEstimate

# Large enough that launch overhead is negligible.
TIMED_SHAPE = (65536, 4096)
# Relative difference between two kernel times that exceeds the spread between measurements.
NOTICEABLE = 0.03

MISSING = "not installed"
KERNEL_DTYPES = ("bfloat16", "float16", "float32")
NORMS = {"rms": "RMSNorm", "layer": "LayerNorm"}
WHY_EXACT = {"torchtitan": "its trainer and settings are extended, and other releases, such as 0.3, have other ones"}
"""Why a package has one version only"""


def report() -> str:
    """Return the report as text."""
    sections = {
        "versions": versions(),
        "devices": devices(),
        # Before the modes is the one that "auto" takes.
        "execution modes": [
            ("auto", f"{resolve_mode('auto')} on {default_device_type()}, whatever the recipe"),
            *((mode, f"{'yes' if available else 'no'}: {reason}") for mode, available, reason in describe_modes()),
        ],
        "norm and cast, bf16, {} x {}".format(*TIMED_SHAPE): estimators(),
    }
    return "\n\n".join(table(title, rows) for title, rows in sections.items())


def versions() -> list[tuple[str, str]]:
    """Return (name, version) of Python, mxtrain, its main dependencies, PyTorch's CUDA and the C compiler."""
    rows = [("python", platform.python_version()), ("mxtrain", mxtrain.__version__)]
    for name in ("torch", "torchtitan", "torchao", "triton", "wandb"):
        found = _version(name)
        problem = untested(name, found) if found != MISSING else ""
        rows.append((name, f"{found}; {problem}" if problem else found))
    rows.append(("CUDA", torch.version.cuda or "none: a CPU build of PyTorch"))
    rows.append(("C compiler", shutil.which("cc") or shutil.which("gcc") or "none: torch.compile and Triton need one"))
    return rows


def devices() -> list[tuple[str, str]]:
    """Return (device, description) of the CPU and of every GPU, GPUs that PyTorch cannot use included."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    rows = [("cpu", f"{platform.machine()}, {core_count()} cores, {memory:.0f} GiB")]
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        capability = f"compute capability {gpu.major}.{gpu.minor}"
        rows.append((f"cuda:{index}", f"{gpu.name}, {capability}, {gpu.total_memory / 2**30:.0f} GiB"))
    if len(rows) == 1:
        why = f"PyTorch {torch.__version__} sees no GPU; check its CUDA build and the driver's version"
        rows += [("unused", f"{name}: {why}") for name in nvidia_gpus()]
    return rows


def estimators() -> list[tuple[str, str]]:
    """Measure the kernel that normalizes and casts. Return (estimator, its time), and advice on which to use."""
    if not (torch.cuda.is_available() and HAS_TRITON):
        return [("not measured", "needs a CUDA device and Triton")]
    from triton.testing import do_bench

    from mxtrain.kernels.mxnorm import mxnorm_cast

    recipe = RECIPES["mxfp8"]
    x = torch.randn(TIMED_SHAPE, device="cuda", dtype=torch.bfloat16)
    estimates = {name: RMSEstimate.for_recipe(recipe, estimator=name) for name in ("pre_round", "exact")}
    times = {name: 1e3 * do_bench(partial(mxnorm_cast, x, estimate, recipe)) for name, estimate in estimates.items()}
    return [*((name, f"{time:.1f} us") for name, time in times.items()), ("advice", advise(**times))]


def advise(pre_round: float, exact: float) -> str:
    """Return advice on the estimator from the two times, in microseconds."""
    saved = 1 - pre_round / exact
    if saved > NOTICEABLE:
        return f"the estimate from block maxima saves {saved:.0%} of this kernel here; 'exact' is the control"
    return (
        "the exact RMS costs no more here: take 'exact' unless you study the method, as the estimate adds noise and "
        "saves nothing"
    )


def explain_norm(rows: int, columns: int, dtype: str = "bfloat16", norm: str = "rms") -> str:
    """Describe how the kernels of a norm walk a matrix [rows, columns] on this machine.

    Args:
        dtype: of the matrix: bfloat16, float16 or float32.
        norm: "rms" for ``mxtrain.rms_norm``, "layer" for ``mxtrain.layer_norm``.

    Raises:
        ConfigError: for an unsupported shape or dtype, or without Triton.
    """
    _check_kernels("--explain-norm", dtype)
    require_one_of("--norm", norm, NORMS)
    from mxtrain.kernels import row_norms
    from mxtrain.kernels.device import MAX_COLUMNS, sm_count

    if rows < 1 or not 1 <= columns <= MAX_COLUMNS:
        raise ConfigError(f"--explain-norm {rows} {columns}: expected at least 1 row, of 1 to {MAX_COLUMNS} columns")
    device, where = _where()
    shape = rows, columns, norm == "layer", sm_count(device)
    plans = {"forward": row_norms.forward_plan(*shape), "backward": row_norms.backward_plan(*shape)}
    texts = [table(name, _norm_rows(plan)) for name, plan in plans.items()]
    return "\n\n".join([f"{NORMS[norm]} of {rows} x {columns}, {dtype}, on {where}", *texts])


def _norm_rows(plan) -> list[tuple[str, str]]:
    persistent = "persistent: registers hold whole rows, which are read once"
    return [
        ("variant", persistent if plan.persistent else "looped: rows are read twice, a chunk of columns at a time"),
        ("rows per tile", str(plan.rows)),
        ("columns at once", str(plan.columns)),
        ("warps", str(plan.warps)),
        ("stages", str(plan.stages)),
        ("programs", str(plan.programs)),
    ]


def explain_router(tokens: int, experts: int, hidden: int, dtype: str = "bfloat16") -> str:
    """Describe by which routes a gate multiplies on this machine, forward and for its weight's gradient, and why.

    Args:
        dtype: of tokens and weight: bfloat16, float16 or float32.

    Raises:
        ConfigError: for an unsupported size or dtype, or without Triton.
    """
    _check_kernels("--explain-router", dtype)
    if min(tokens, experts, hidden) < 1:
        raise ConfigError(f"--explain-router {tokens} {experts} {hidden}: expected sizes of at least 1")
    from mxtrain.kernels import decompose_k

    # Part -> M, N and K of its product, whether operands lie along K.
    products = {
        "forward": ((tokens, experts, hidden), True),
        "gradient of the weight": ((experts, hidden, tokens), False),
    }
    device, where = _where()
    texts = []
    for name, (sizes, along_k) in products.items():
        choice = decompose_k.choose(*sizes, getattr(torch, dtype), device, along_k)
        product = f"[{sizes[0]}, {sizes[2]}] x [{sizes[2]}, {sizes[1]}]"
        texts.append(table(f"{name}, {product}", _route_rows(choice)))
    return "\n\n".join([f"router of {tokens} tokens of {hidden} to {experts} experts, {dtype}, on {where}", *texts])


def _route_rows(choice) -> list[tuple[str, str]]:
    plan = choice.plan
    if plan is None:
        return [("route", "mm: one torch.mm"), ("why", choice.why)]
    return [
        ("route", f"triton: {'one launch' if plan.splits == 1 else 'two launches'}"),
        ("splits", str(plan.splits)),
        ("tile", f"{plan.block_m} x {plan.block_n}, {plan.block_k} of K at once"),
        ("warps", str(plan.warps)),
        ("stages", str(plan.stages)),
        ("why", choice.why),
    ]


def _check_kernels(flag: str, dtype: str) -> None:
    require_one_of("--dtype", dtype, KERNEL_DTYPES)
    if not HAS_TRITON:
        raise ConfigError(f"{flag} is about Triton kernels, and Triton is not installed")


def _where() -> tuple[torch.device, str]:
    """The device to explain, and its name in words."""
    from mxtrain.kernels.device import sm_count

    device = torch.device(default_device_type())
    gpu = f"here: {torch.cuda.get_device_name()}" if device.type == "cuda" else "no GPU here"
    return device, f"{sm_count(device)} SMs ({gpu})"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return MISSING


def table(title: str, rows: list[tuple[str, str]]) -> str:
    """Return a title and below it, indented, the rows of (name, text)."""
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def untested(name: str, version: str) -> str:
    """Return what is wrong with a package's ``version`` and what to do; "" if it is among the tested ones."""
    try:
        needed = [Requirement(text) for text in requires("mxtrain") or []]
    except PackageNotFoundError:  # a checkout on PYTHONPATH that was never installed
        return ""
    tested = next((each.specifier for each in needed if each.name == name), None)
    if not tested or tested.contains(version, prereleases=True):
        return ""
    why = f" ({WHY_EXACT[name]})" if name in WHY_EXACT else ""
    return f"not tested: mxtrain was tested with {tested}{why}; pip install '{name}{tested}'"
