"""Training step of a Llama model in low precision against bf16: tokens/s, memory, time of the first step.

    python scripts/bench/train.py                                        MXFP8 on every model
    python scripts/bench/train.py --models 88m --variants bf16 mxnorm --profile
    python scripts/bench/train.py --variants bf16 mxnorm mxnorm_nvfp4 mx_linear_nvfp4
    python scripts/bench/train.py --repeat 3 --json train.json --plot train.png
    python scripts/bench/train.py --variants bf16 mxnorm --no-graph-passes

The model of the installed TorchTitan trains as TorchTitan 0.2.2 trains it on one device: fp32 weights under bf16
autocast, every block compiled alone with fullgraph=True, compiled cross-entropy, fused AdamW, gradients clipped to norm
1, no activation checkpointing.
Tokens are random and new in every step, so the loss only shows that the step is sound. NVFP4 keeps the last 15 % of the
blocks in bf16, its recipe's default; variants that end in "_all" keep none. "mxnorm_mixed" runs NVFP4 forward and MXFP8
backward. "mxnorm_fp8_merged" has this mode, whatever --mode says. "mxnorm_single" multiplies the linears of a norm one
by one, "mxnorm_single_fprop" in the forward only, as under selective activation checkpointing. "bf16_passes" is bf16
with mxtrain's passes over graphs. "float8_tensorwise" and "float8_rowwise" are torchao's FP8 training.

The first step is timed with empty Inductor and Triton caches, after a throw-away model has paid for imports and compile
workers. Memory is the peak that the allocator holds during the timed steps. The tokens of "88m_host" are so few that
its steps show the host's time.
"""

import argparse
import gc
import math
import statistics
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import NamedTuple

import benchmarking
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._inductor.utils import fresh_cache
from torchao.float8 import Float8LinearConfig, convert_to_float8_training

import mxtrain
from mxtrain.compile import passes
from mxtrain.formats.hardware import default_device_type, resolve_mode
from mxtrain.parallel.activation_checkpoint import multiply_one_by_one
from mxtrain.titan.releases import engine

KERNEL_PACKAGES = ("mxtrain", "torchao")
MIXED = "fprop=nvfp4, dgrad=mxfp8, wgrad=mxfp8"
OTHER_RECIPES = ("mxfp8_2d", "mxfp4", "nvfp4_row", "nvfp4_4over6", "nvfp4_rl")
FLOAT8 = ("tensorwise", "rowwise")
PEERS = ("bf16", "bf16_passes", "fused_norm", "torchao", *(f"float8_{name}" for name in FLOAT8))
PROFILED_STEPS = 2
SEED = 0


class Model(NamedTuple):
    """A model, as a flavor of Llama 3 with other sizes, and its batch: sequences x tokens."""

    flavor: str
    vocab_size: int
    batch: int
    seq_len: int
    sizes: dict = {}


MODELS = {
    "88m": Model("125M", 2048, 32, 2048),
    "88m_host": Model("125M", 2048, 1, 256),
    "1.5b": Model("1B", 128256, 4, 4096),
    "8b4": Model("8B", 128256, 4, 4096, {"n_layers": 4}),
    "tiny": Model("debugmodel", 256, 2, 64, {"dim": 64, "n_layers": 2, "n_heads": 2, "hidden_dim": 192}),
}
HEADS = ("output", "lm_head")
"""Name of the output head in TorchTitan 0.2.2 and in 0.3"""


# Variants


def convert(model: nn.Module, mode: str, converter: str = "mxnorm", **settings) -> None:
    mxtrain.convert(model, converter, mode=mode, **settings)


def convert_grouped(model: nn.Module, mode: str) -> nn.Module:
    mxtrain.convert(model, "mxnorm", mode=mode)
    return model


class TorchaoLinear(nn.Linear):
    """torchao's MXFP8 linear for training, emulated: the peer of ``mx_linear``.

    Operands are bf16, as autocast passes them to nn.Linear; without autocast they keep their dtype. torchao casts them
    along the axis that each of the three GEMMs reduces over, dequantizes them and multiplies in bf16.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        device_type = x.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else x.dtype
        return self.multiply(x.to(dtype), self.weight.to(dtype))


def convert_torchao(model: nn.Module) -> None:
    """Replace every linear except the head by torchao's, with RCEIL scales (also mxtrain's default)."""
    multiply = torchao_linear()
    for parent_name, parent in list(model.named_modules()):
        for name, linear in list(parent.named_children()):
            if type(linear) is nn.Linear and f"{parent_name}.{name}".strip(".") not in HEADS:
                new = TorchaoLinear(linear.in_features, linear.out_features, bias=False, device="meta")
                new.weight, new.multiply = linear.weight, multiply
                setattr(parent, name, new)


def torchao_linear():
    """Return torchao's differentiable x W^T on MXFP8 operands, emulated, with RCEIL scales. 0.18 moved its module."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    try:
        module = import_module("torchao.prototype.moe_training.mxfp8_linear")
    except ModuleNotFoundError:
        module = import_module("torchao.prototype.mx_formats.mx_linear")

    def multiply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return module._to_mxfp8_then_scaled_mm(x, weight, KernelPreference.EMULATED, ScaleCalculationMode.RCEIL)

    return multiply


def convert_float8(model: nn.Module, mode: str, recipe: str) -> None:
    """Replace every linear except the head by torchao's Float8Linear, which TorchTitan's float8 converter takes."""
    config = replace(Float8LinearConfig.from_recipe_name(recipe), emulate=mode == "reference")
    convert_to_float8_training(model, config=config, module_filter_fn=lambda module, name: name not in HEADS)


# Variant -> function that converts the bf16 model on the meta device.
VARIANTS = {
    "bf16": lambda model, mode: None,
    "bf16_passes": lambda model, mode: passes.install(),
    "mx_linear": partial(convert, converter="mx_linear"),
    "mxnorm": convert,
    "mxnorm_fp8_merged": lambda model, mode: convert(model, "fp8_merged"),
    "mxnorm_p1": partial(convert, p=1),
    "mxnorm_exact": partial(convert, estimator="exact"),
    **{
        f"{converter}_nvfp4{suffix}": partial(convert, converter=converter, recipe="nvfp4", high_precision_share=share)
        for converter in ("mx_linear", "mxnorm")
        for suffix, share in (("", None), ("_all", 0.0))
    },
    **{f"mxnorm_{name}": partial(convert, recipe=name) for name in OTHER_RECIPES},
    "mxnorm_single": partial(convert, group_linears=False),
    "mxnorm_single_nvfp4": partial(convert, recipe="nvfp4", group_linears=False),
    "mxnorm_single_fprop": lambda model, mode: multiply_one_by_one(convert_grouped(model, mode)),
    "mxnorm_mixed": partial(convert, recipe=MIXED),
    "fused_norm": lambda model, mode: mxtrain.convert(model, "fused_norm", when_compiled="kernel"),
    "torchao": lambda model, mode: convert_torchao(model),
    **{f"float8_{name}": partial(convert_float8, recipe=name) for name in FLOAT8},
}
DEFAULT_VARIANTS = ["bf16", "mx_linear", "mxnorm", "mxnorm_exact", "torchao"]


# One training run


@dataclass(frozen=True)
class Settings:
    """Settings shared by all variants."""

    device: torch.device
    mode: str
    autocast: bool
    compile: bool
    warmup: int
    steps: int
    profile: bool
    graph_passes: bool


class Trainer:
    """A model with its optimizer. ``step`` trains on a random batch and returns the loss without waiting for it."""

    def __init__(self, model: Model, variant: str, settings: Settings):
        self.settings, self.shape, self.vocab_size = settings, (model.batch, model.seq_len + 1), model.vocab_size
        self.model, self.loss = build_model(model, variant, settings), cross_entropy
        if settings.compile:
            for block in self.model.layers.values():
                block.compile(fullgraph=True)
            self.loss = torch.compile(cross_entropy)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )
        self.tokens = torch.Generator(settings.device).manual_seed(SEED)
        self.steps = 0

    def step(self) -> torch.Tensor:
        device = self.settings.device
        self.steps += 1
        mxtrain.set_rounding_step(self.steps)  # as ``mxtrain train`` does
        batch = torch.randint(self.vocab_size, self.shape, generator=self.tokens, device=device)
        inputs, labels = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=self.settings.autocast):
            logits = self.model(inputs)
            loss = self.loss(logits, labels) / labels.numel()
        del logits  # as TorchTitan does: otherwise the backward pass holds them twice
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The sum over all tokens, as TorchTitan's loss."""
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), reduction="sum")


def build_model(model: Model, variant: str, settings: Settings) -> nn.Module:
    """Build the converted model on the meta device, as TorchTitan does, with the same weights for every variant."""
    sized = engine().SizedModel.of_flavor("llama3", model.flavor, model.sizes, model.vocab_size, model.seq_len)
    transformer = sized.on_meta()
    passes.remove()  # which an earlier variant installed
    with engine().convertible(transformer):
        VARIANTS[variant](transformer, settings.mode)
    if not settings.graph_passes:
        passes.remove()
    # As in ``mxtrain train``: bf16 products have fp32 sums where they stand for those of MX tensor cores.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = variant in PEERS
    transformer.to_empty(device=settings.device)
    torch.manual_seed(SEED)
    with torch.no_grad():
        transformer.init_weights(buffer_device=settings.device)
    return transformer.train()


def measure(model: Model, variant: str, settings: Settings) -> dict:
    """Train the variant and return its measurements; ``COLUMNS`` has the names."""
    trainer = Trainer(model, variant, settings)
    watch = Stopwatch(settings.device)
    watch.mark()
    loss = trainer.step()
    watch.mark()
    (first,) = watch.seconds()

    # Compilation holds memory that training does not need, for example to try kernels.
    empty_cache(settings.device)
    for _ in range(settings.warmup):
        loss = trainer.step()
    gc.collect()
    reset_peak_memory(settings.device)
    watch = Stopwatch(settings.device)
    watch.mark()
    for _ in range(settings.steps):
        loss = trainer.step()
        watch.mark()
    seconds = watch.seconds()

    result = {
        "ms": 1e3 * statistics.median(seconds),
        "tokens/s": model.batch * model.seq_len / statistics.median(seconds),
        "first_step_s": first,
        **peak_memory(settings.device),
        "loss": loss.item(),
        "step_ms": [1e3 * s for s in seconds],
    }
    if not math.isfinite(result["loss"]):
        result["error"] = "loss is not finite"
    if settings.profile:
        result["profile"] = profile(trainer)
    return result


def profile(trainer: Trainer) -> dict:
    """Return the device time of a training step by kernel and by class."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(PROFILED_STEPS):
            trainer.step()
        torch.cuda.synchronize()
    return benchmarking.summarize_kernels(
        benchmarking.device_kernels(profiler), PROFILED_STEPS, benchmarking.triton_kernel_names(["mxtrain"])
    )


class Stopwatch:
    """Seconds between marks. On a GPU the marks are CUDA events, so the host waits for no step."""

    def __init__(self, device: torch.device):
        self.on_gpu, self.marks = device.type == "cuda", []
        if self.on_gpu:
            torch.cuda.synchronize()

    def mark(self) -> None:
        if self.on_gpu:
            self.marks.append(torch.cuda.Event(enable_timing=True))
            self.marks[-1].record()
        else:
            self.marks.append(time.perf_counter())

    def seconds(self) -> list[float]:
        pairs = list(zip(self.marks, self.marks[1:]))
        if self.on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(end) / 1e3 for start, end in pairs]
        return [end - start for start, end in pairs]


def empty_cache(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def reset_peak_memory(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def peak_memory(device: torch.device) -> dict:
    """Return the peaks of reserved and of allocated memory in GiB; empty on a CPU."""
    if device.type != "cuda":
        return {}
    return {
        "GiB": torch.cuda.max_memory_reserved() / benchmarking.GIB,
        "allocated GiB": torch.cuda.max_memory_allocated() / benchmarking.GIB,
    }


# All runs


def isolated(model: Model, variant: str, settings: Settings) -> dict:
    """Call ``measure`` with nothing compiled and nothing in memory, as in a new process. Errors become results."""
    torch._dynamo.reset()
    empty_cache(settings.device)
    benchmarking.forget_triton_kernels(KERNEL_PACKAGES)
    gc.disable()  # as TorchTitan does while it trains
    with fresh_cache():
        try:
            return measure(model, variant, settings)
        except Exception as error:
            return {"error": benchmarking.report_error(error)}
        finally:
            gc.enable()
            mxtrain.set_rounding_step(None)


def median_result(runs: list[dict]) -> dict:
    """Return the medians over the repetitions of a variant, and the first error."""
    result = {}
    for name in ("tokens/s", "ms", "first_step_s", "GiB", "allocated GiB", "loss"):
        values = [run[name] for run in runs if name in run]
        if values:
            result[name] = statistics.median(values)
    errors = [run["error"] for run in runs if "error" in run]
    if errors:
        result["error"] = errors[0]
    return result


def compare(runs: dict[tuple[str, str], list[dict]]) -> list[dict]:
    """Return a row per model and variant, with ratios to bf16 and torchao on the same model in the same run."""
    medians = {key: median_result(results) for key, results in runs.items()}
    rows = []
    for (model, variant), result in medians.items():
        row = {"model": model, "variant": variant, **result}
        for ratio, (name, base) in RATIOS.items():
            other = medians.get((model, base), {})
            if name in result and name in other:
                row[ratio] = result[name] / other[name]
        rows.append(row)
    return rows


# Ratio -> (measurement, the variant to divide by).
RATIOS = {
    "x bf16": ("tokens/s", "bf16"),
    "x torchao": ("tokens/s", "torchao"),
    "x first": ("first_step_s", "bf16"),
    "x GiB": ("GiB", "bf16"),
}
COLUMNS = {
    "model": "<",
    "variant": "<",
    "tokens/s": ",.0f",
    "x bf16": ".3f",
    "x torchao": ".3f",
    "ms": ".2f",
    "first_step_s": ".1f",
    "x first": ".2f",
    "GiB": ".2f",
    "x GiB": ".2f",
    "loss": ".4f",
    "error": "<",
}


def report(runs: dict[tuple[str, str], list[dict]], facts: dict, args: argparse.Namespace) -> None:
    """Write the results so far to the requested files. Called after every run: an interrupted run keeps its results."""
    rows = compare(runs)
    if args.json:
        details = [{"model": m, "variant": v, "runs": results} for (m, v), results in runs.items()]
        benchmarking.write_json(args.json, {**facts, "results": rows, "runs": details})
    if args.plot:
        models = dict.fromkeys(row["model"] for row in rows)
        panels = {
            title: {m: {row["variant"]: row.get(ratio) for row in rows if row["model"] == m} for m in models}
            for title, ratio in (("tokens/s", "x bf16"), ("first step", "x first"), ("peak memory", "x GiB"))
        }
        benchmarking.bar_plot(args.plot, panels, "relative to bf16")


def in_one_line(model: str, variant: str, result: dict) -> str:
    """Return the result of one run in one line."""
    if "tokens/s" not in result:
        return f"{model} {variant}: {result['error']}"
    return f"{model} {variant}: {result['tokens/s']:,.0f} tokens/s, first step {result['first_step_s']:.1f} s"


def print_profile(name: str, summary: dict) -> None:
    print(f"\n{name}: {summary['ms']:.3f} ms of device time a step")
    print(benchmarking.table(summary["classes"], benchmarking.CLASS_COLUMNS))
    print(benchmarking.table(summary["kernels"], benchmarking.KERNEL_COLUMNS), flush=True)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["88m", "1.5b", "8b4"])
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=DEFAULT_VARIANTS)
    parser.add_argument("--mode", default="auto", help="execution mode of mxtrain's variants")
    parser.add_argument("--device", choices=["cuda", "cpu"], default=default_device_type())
    parser.add_argument("--warmup", type=int, default=10, help="untimed steps after the first")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--repeat", type=int, default=1, help="runs of the list of variants; medians are reported")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: on a GPU only")
    parser.add_argument(
        "--graph-passes", action=argparse.BooleanOptionalAction, default=True, help="mxtrain's passes over graphs"
    )
    parser.add_argument("--autocast", action=argparse.BooleanOptionalAction, default=True, help="to bf16")
    parser.add_argument("--profile", action="store_true", help=f"profile {PROFILED_STEPS} more steps (GPU only)")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--plot", metavar="FILE", help="PNG")
    args = parser.parse_args(argv)
    if args.compile is None:
        args.compile = args.device == "cuda"
    if args.profile and args.device != "cuda":
        parser.error("--profile needs a GPU")
    if args.steps < 1 or args.repeat < 1 or args.warmup < 0:
        parser.error("--steps and --repeat must be at least 1, --warmup at least 0")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    settings = Settings(
        torch.device(args.device),
        resolve_mode(args.mode, args.device),
        args.autocast,
        args.compile,
        args.warmup,
        args.steps,
        args.profile,
        args.graph_passes,
    )
    facts = {**benchmarking.machine(args.device), "settings": {**vars(args), "mode": settings.mode}}
    print(f"{benchmarking.describe(facts)}; mode {settings.mode}, {'compiled' if settings.compile else 'eager'}")
    if "torchao" in args.variants:
        print("torchao: MXFP8 training linears, emulated, RCEIL scales, in place of every linear except output")

    if settings.compile:
        for variant in ["bf16", *(name for name in args.variants if name != "bf16")][:2]:
            isolated(MODELS["tiny"], variant, replace(settings, warmup=0, steps=1, profile=False))

    runs: dict[tuple[str, str], list[dict]] = {}
    for model in args.models:
        for _ in range(args.repeat):
            for variant in args.variants:
                result = isolated(MODELS[model], variant, settings)
                runs.setdefault((model, variant), []).append(result)
                print(in_one_line(model, variant, result), flush=True)
                if "profile" in result:
                    print_profile(f"{model} {variant}", result["profile"])
                report(runs, facts, args)

    rows = compare(runs)
    print("\n" + benchmarking.table(rows, COLUMNS))
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
