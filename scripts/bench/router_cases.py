"""The cases of ``router.py``: each section's shapes, inputs, implementations and checks."""

import functools
import os
from collections.abc import Callable
from typing import NamedTuple

# Set before Inductor is imported, which would print every choice it times.
os.environ.setdefault("TORCHINDUCTOR_AUTOTUNE_NUM_CHOICES_DISPLAYED", "0")
os.environ.setdefault("TORCHINDUCTOR_MAX_AUTOTUNE_REPORT_CHOICES_STATS", "0")

import torch  # noqa: E402 - after the environment is set
import torch.nn.functional as F  # noqa: E402
from kernel_benchmark import compiled_function, draw  # noqa: E402

import mxtrain  # noqa: E402

MAX_AUTOTUNE = "max-autotune-no-cudagraphs"
TOP_K = 8
# Noise of an fp32 sum on tensor cores, which truncate; relative to the largest output.
NOISE = 1e-4
# Allowed relative error norm of a gradient. Two roundings to bf16 (logits' gradient, result) give 0.0024.
GRADIENT_ERROR = 2**-8


class Shape(NamedTuple):
    """M, N and K: tokens, experts and hidden size, for a router."""

    rows: int
    columns: int
    inner: int

    def __str__(self) -> str:
        return "x".join(map(str, self))


class Options(NamedTuple):
    """What the entries depend on besides the shape."""

    device: str
    custom_op_mode: str | None = None
    """Mode of torch.compile around the op that Inductor tunes"""


class Entry(NamedTuple):
    """One implementation to time. ``make`` returns a function of the inputs, which may compile on its first call."""

    name: str
    make: Callable[[], Callable]
    ours: bool = False
    autotuned: bool = False
    """Inductor tunes it, which takes seconds"""
    note: Callable[[], str] | None = None


class Section(NamedTuple):
    """Shapes, and functions of one shape.

    Attributes:
        inputs: (shape, device) -> tensors, new in every call.
        entries: (shape, options) -> implementations to time.
        judge: (inputs, result) -> columns of the row; "check" is "ok" for a right result.
        ratios: column -> names of peers; the ratio compares ours with the fastest of them.
        reach: column -> goals for the geometric mean and the minimum of its ratios.
        group: shape -> key; shapes with equal keys share compiled graphs.
    """

    title: str
    shapes: tuple[Shape, ...]
    quick: tuple[Shape, ...]
    inputs: Callable
    entries: Callable
    judge: Callable
    ratios: dict[str, tuple[str, ...]]
    reach: dict[str, tuple[float, float]]
    group: Callable[[Shape], object] = lambda shape: shape


# Implementations


def logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, weight.t())


def wide_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    if x.is_cuda:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return torch.mm(x.float(), weight.float().t())


def our_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return mxtrain.decompose_k_mm(x, weight.t(), out_dtype=torch.float32)


def relu_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.relu(torch.mm(a, b))


def our_relu_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return mxtrain.decompose_k_mm(a, b, epilogue="relu")


@functools.cache
def custom_op():
    """Return a matmul that Inductor tunes per shape, without mxtrain's kernels among its choices."""
    import inductor_mm

    return inductor_mm.tuned_op("bench_router::mm", wide=False, ranges=False, ours=False)


def custom_op_logits(mode: str | None) -> Callable:
    op = custom_op()
    return compiled_function(lambda x, weight: op(x, weight.t()), mode)


def custom_op_relu_mm(mode: str | None) -> Callable:
    op = custom_op()
    return compiled_function(lambda a, b: torch.relu(op(a, b)), mode)


def our_entries(run: Callable, products: dict[Shape, bool], options: Options) -> list[Entry]:
    """Return our entry, with the chosen plans as its note.

    Args:
        products: shape of each product in ``run`` -> whether its operands are contiguous along K.
    """
    from mxtrain.nn.decompose_k.kernels import choose

    device = torch.empty(0, device=options.device).device

    def note() -> str:
        return "; ".join(
            describe_plan(choose(*shape, torch.bfloat16, device, along_k).plan) for shape, along_k in products.items()
        )

    return [Entry("mxtrain", lambda: run, ours=True, note=note)]


def describe_plan(plan) -> str:
    if plan is None:
        return "torch.mm"
    blocks = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
    launches = "one launch" if plan.splits == 1 else "two launches"
    return f"{blocks}, {plan.splits} parts, {plan.warps} warps, {plan.stages} stages, {launches}"


# Section router


def router_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    # TorchTitan's initialization of the weight: scores are neither all alike nor all 0 or 1.
    return draw((shape.rows, shape.inner), device), draw((shape.columns, shape.inner), device).mul_(0.02)


def router_entries(shape: Shape, options: Options) -> list[Entry]:
    return [
        Entry("eager", lambda: logits),
        Entry("eager, fp32 out", lambda: wide_logits),
        Entry("max-autotune", lambda: compiled_function(logits, MAX_AUTOTUNE), autotuned=True),
        Entry("custom-op", lambda: custom_op_logits(options.custom_op_mode), autotuned=True),
        *our_entries(our_logits, {shape: True}, options),
    ]


def judge_router(inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> dict:
    x, weight = inputs
    expected = x.double() @ weight.double().t()
    return {**judge(result, expected), "flips": flips(result, expected)}


def judge(result: torch.Tensor, expected: torch.Tensor) -> dict:
    """Return the largest error relative to the largest output, and whether rounding and fp32 noise explain it."""
    largest = expected.abs().max()
    difference = (result.double() - expected).abs()
    allowed = torch.finfo(result.dtype).eps * expected.abs() + NOISE * largest
    right = result.shape == expected.shape and bool((difference <= allowed).all())
    return {"error": float(difference.max() / largest), "check": "ok" if right else "differs"}


def flips(result: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the share of tokens whose top experts by sigmoid score differ from those by ``expected`` logits."""
    count = min(TOP_K, expected.shape[1] // 2)
    chosen = torch.topk(result.float().sigmoid(), count).indices.sort().values
    right = torch.topk(expected, count).indices.sort().values
    return float((chosen != right).any(1).double().mean())


# Section study


def study_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    return draw((shape.rows, shape.inner), device), draw((shape.inner, shape.columns), device)


def study_entries(shape: Shape, options: Options) -> list[Entry]:
    return [
        Entry("eager", lambda: relu_mm),
        Entry("max-autotune", lambda: compiled_function(relu_mm, MAX_AUTOTUNE), autotuned=True),
        Entry("custom-op", lambda: custom_op_relu_mm(options.custom_op_mode), autotuned=True),
        *our_entries(our_relu_mm, {shape: False}, options),
    ]


def judge_study(inputs: tuple[torch.Tensor, ...], result: torch.Tensor) -> dict:
    a, b = inputs
    return judge(result, (a.double() @ b.double()).relu())


# Section gate


def gate_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    """Return tokens, weight, fp32 weight, and the gradient of the logits in fp32 and bf16."""
    x, weight = router_inputs(shape, device)
    gradient = draw((shape.rows, shape.columns), device, torch.float32)
    leaves = (tensor.requires_grad_() for tensor in (x, weight, weight.float()))
    return *leaves, gradient, gradient.bfloat16()


def gate_step(forward: Callable, wide: bool = False) -> Callable:
    """Return a function that computes logits and the gradients of tokens and weight (fp32 weight if ``wide``)."""

    def run(x, weight, wide_weight, gradient, narrow_gradient):
        weight = wide_weight if wide else weight
        result = forward(x, weight)
        gradient = gradient if result.dtype == torch.float32 else narrow_gradient
        return result, *torch.autograd.grad(result, (x, weight), gradient)

    return run


def fp32_logits(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x.float(), weight)


def gate_entries(shape: Shape, options: Options) -> list[Entry]:
    of_weight = Shape(shape.columns, shape.inner, shape.rows)
    return [
        Entry("eager bf16", lambda: gate_step(logits)),
        Entry("eager fp32", lambda: gate_step(fp32_logits, wide=True)),
        Entry("max-autotune", lambda: gate_step(compiled_function(logits, MAX_AUTOTUNE)), autotuned=True),
        *our_entries(gate_step(our_logits), {shape: True, of_weight: False}, options),
    ]


def judge_gate(inputs: tuple[torch.Tensor, ...], result: tuple[torch.Tensor, ...]) -> dict:
    x, weight, _, gradient, _ = (tensor.detach().double() for tensor in inputs)
    logits, dx, dweight = result
    row = judge_router((x, weight), logits.detach())
    row |= {"dx error": relative_norm(dx, gradient @ weight), "dw error": relative_norm(dweight, gradient.t() @ x)}
    if max(row["dx error"], row["dw error"]) > GRADIENT_ERROR:
        row["check"] = "differs"
    return row


def relative_norm(result: torch.Tensor, expected: torch.Tensor) -> float:
    return float((result.double() - expected).norm() / expected.norm())


# Section dispatch


def dispatch_inputs(shape: Shape, device: str) -> tuple[torch.Tensor, ...]:
    x, weight = router_inputs(shape, device)
    torch._dynamo.mark_dynamic(x, 0)
    return x, weight


@functools.cache
def dynamic_function(which: str) -> Callable:
    """Return compiled fp32 logits, by our op or by Inductor's choice per range of M; one function for all shapes."""
    if which == "ours":
        return torch.compile(our_logits, fullgraph=True)
    op = op_by_range()
    return torch.compile(lambda x, weight: op(x, weight.t()), fullgraph=True)


@functools.cache
def op_by_range():
    """Return a matmul with fp32 result that Inductor tunes per range of M."""
    import inductor_mm

    return inductor_mm.tuned_op("bench_router::mm_by_range", wide=True, ranges=True)


def dispatch_entries(shape: Shape, options: Options) -> list[Entry]:
    return [
        Entry("eager", lambda: logits),
        Entry("Inductor by range", lambda: dynamic_function("inductor"), autotuned=True),
        *our_entries(dynamic_function("ours"), {shape: True}, options),
    ]


# The table of sections

TOKENS = (1, 16, 64, 256, 1024, 4096, 8192, 16384)
# hidden x experts
WIDTHS = ((7168, 256), (5120, 128), (5120, 16), (2048, 128), (2048, 64))
SIDES, DEPTHS = (16, 32, 48, 64), range(8192, 32768 + 1, 4096)


def _shapes(tokens: tuple[int, ...], widths: tuple[tuple[int, int], ...]) -> tuple[Shape, ...]:
    return tuple(Shape(count, experts, hidden) for hidden, experts in widths for count in tokens)


SECTIONS = {
    "router": Section(
        "logits from bf16 operands; ours are fp32, the peers' bf16",
        _shapes(TOKENS, WIDTHS),
        _shapes((1, 64, 1024, 8192), WIDTHS[:1]),
        router_inputs,
        router_entries,
        judge_router,
        {
            "x best": ("eager", "max-autotune"),
            "x eager": ("eager",),
            "x fp32 out": ("eager, fp32 out",),
            "x custom-op": ("custom-op",),
        },
        {"x best": (1.3, 0.97)},
    ),
    "study": Section(
        "relu(A B), bf16",
        tuple(Shape(side, side, depth) for depth in DEPTHS for side in SIDES),
        (Shape(16, 16, 8192), Shape(64, 64, 32768)),
        study_inputs,
        study_entries,
        judge_study,
        {"x eager": ("eager",), "x custom-op": ("custom-op",), "x best": ("eager", "max-autotune")},
        {"x eager": (1.35, 0.0), "x custom-op": (1.05, 0.0)},
    ),
    "gate": Section(
        "logits and gradients; ours with fp32 logits",
        (Shape(8192, 256, 7168),),
        (Shape(8192, 256, 7168),),
        gate_inputs,
        gate_entries,
        judge_gate,
        {"x eager": ("eager bf16",), "x fp32": ("eager fp32",), "x best": ("eager bf16", "max-autotune")},
        {"x eager": (1.2, 0.0), "x fp32": (3.0, 0.0)},
    ),
    "dispatch": Section(
        "fp32 logits from bf16 operands in graphs with dynamic M: our dispatch, and Inductor's choice by range",
        _shapes(TOKENS[1:], WIDTHS),
        _shapes((64, 8192), WIDTHS[:1]),
        dispatch_inputs,
        dispatch_entries,
        judge_router,
        {"x Inductor": ("Inductor by range",)},
        {},
        # All M share a graph; other widths need their own.
        lambda shape: shape[1:],
    ),
}
