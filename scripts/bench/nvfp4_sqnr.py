"""The cost of a tensor scale known before training: SQNR of NVFP4 with MXNorm's static scale and with the amax.

    python scripts/bench/nvfp4_sqnr.py                                  random rows of several kinds and lengths
    python scripts/bench/nvfp4_sqnr.py --columns 4096 --json sqnr.json
    python scripts/bench/nvfp4_sqnr.py --train 200                      also the inputs of the norms of a small Llama 3
    python scripts/bench/nvfp4_sqnr.py --activations inputs.pt          also tensors [..., D] from a file

MXNorm normalizes the rows with each estimate; then they are cast to NVFP4 along the row, rounded to nearest. SQNR is
10 log10(sum x^2 / sum error^2) in dB, over everything and for the worst blocks ("1%": one block in a hundred is below).
The static scale is a power of two that depends on row length and estimate. The dynamic scale is amax / (6 * 448). Block
scales are E4M3 without subnormal numbers: 2^-6 to 448 times the tensor scale. A larger tensor scale therefore leaves
less room for small blocks. "at floor" counts blocks whose scale had to be raised to 2^-6; "1%" shows the effect.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import benchmarking
import torch

from mxtrain.formats.estimate import RMSEstimate
from mxtrain.formats.matrices import at_least_fp32
from mxtrain.formats.mxnorm import block_amax, inverse_rms, scale_rows
from mxtrain.formats.nvfp4 import NVFP4, SCALE_MIN, static_tensor_scale
from mxtrain.formats.nvfp4.reference import cast, dequantize, dynamic_tensor_scale
from mxtrain.formats.parse import get_recipe

ESTIMATES = {"p=1": (1, "pre_round"), "p=2": (2, "pre_round"), "exact": (2, "exact")}
ELEMENTS = 2**20
EPS = 1e-5
SEED = 0

COLUMNS = {
    "input": "<",
    "D": "d",
    "estimate": "<",
    "static scale": "g",
    "static / dynamic": ".1f",
    "static dB": ".2f",
    "dynamic dB": ".2f",
    "cost dB": ".2f",
    "static 1% dB": ".2f",
    "dynamic 1% dB": ".2f",
    "static at floor": ".2%",
    "dynamic at floor": ".2%",
}


# Inputs


def drawn(columns: int) -> dict[str, torch.Tensor]:
    """Return random rows of ``columns`` elements by kind. Their scale is arbitrary: a norm removes it."""
    generator = torch.Generator().manual_seed(SEED)
    rows = max(16, ELEMENTS // columns)
    gaussian = torch.randn(rows, columns, generator=generator)
    uniform = torch.rand(rows, columns, generator=generator) - 0.5
    laplace = -uniform.sign() * torch.log1p(-2 * uniform.abs())
    features = gaussian.clone()
    features[:, :: columns // 4] *= 30  # the same four features in every row
    single, every_row = gaussian.clone(), gaussian.clone()
    single[0, columns // 2] = 1000  # a massive activation of one token
    every_row[:, columns // 2] = 1000
    gains = 10 ** (-4 * torch.rand(columns // NVFP4.block_size, generator=generator))
    uneven = gaussian * gains.repeat_interleave(NVFP4.block_size)
    return {
        "gaussian": gaussian,
        "laplace": laplace,
        "4 features x 30": features,
        "one row with 1000": single,
        "all rows with 1000": every_row,
        "blocks 1e-4 to 1": uneven,
    }


def trained(steps: int) -> dict[str, torch.Tensor]:
    """Train TorchTitan's debug Llama 3 on the bytes of the standard library and return the inputs of its norms."""
    from mxtrain.data.python_source import list_files
    from mxtrain.titan.releases import engine

    generator = torch.Generator().manual_seed(SEED)
    torch.manual_seed(SEED)
    text = b"".join(Path(file.path).read_bytes() for file in list_files(False)[:300])
    tokens, length = torch.frombuffer(bytearray(text), dtype=torch.uint8), 128
    model = engine().SizedModel.of_flavor("llama3", "debugmodel", {}, 256, length).on_meta()
    model.to_empty(device="cpu")
    with torch.no_grad():
        model.init_weights(buffer_device=torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def batch() -> torch.Tensor:
        starts = torch.randint(len(tokens) - length - 1, (8, 1), generator=generator)
        return tokens[starts + torch.arange(length + 1)].long()

    for step in range(steps):
        ids = batch()
        loss = torch.nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            print(f"step {step + 1}: loss {loss.item():.2f}", flush=True)
    found = {}
    for name, module in model.named_modules():
        if name.endswith("norm"):
            module.register_forward_pre_hook(lambda _, args, name=name: found.update({name: args[0].detach()}))
    with torch.no_grad():
        model(batch()[:, :-1])
    return found


def loaded(path: str) -> dict[str, torch.Tensor]:
    """Load a file written by ``torch.save``: one tensor, a list, or a dict by name."""
    content = torch.load(path, map_location="cpu", weights_only=True)
    if isinstance(content, torch.Tensor):
        content = [content]
    if not isinstance(content, dict):
        content = {f"{Path(path).stem} {index}": tensor for index, tensor in enumerate(content)}
    return content


# Measurements


def decibels(signal: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """Return 10 log10(signal / noise); infinity without noise, as for a block of zeros."""
    return torch.where(noise > 0, 10 * (signal / noise).log10(), float("inf"))


def measure(xhat: torch.Tensor, tensor_scale: float | torch.Tensor) -> tuple[float, float, float]:
    """Return SQNR over everything, SQNR of the worst 1 % of blocks, and the share of blocks at the lowest scale."""
    values = dequantize(*cast(xhat, tensor_scale), tensor_scale)
    signal, noise = (
        part.double().square().reshape(-1, NVFP4.block_size).sum(1) for part in (xhat, values.double() - xhat)
    )
    lowest = NVFP4.element_max * SCALE_MIN * tensor_scale
    at_floor = (block_amax(xhat, NVFP4.block_size) < lowest).float().mean().item()
    of_blocks = decibels(signal, noise).sort().values
    return decibels(signal.sum(), noise.sum()).item(), of_blocks[len(of_blocks) // 100].item(), at_floor


def compare(inputs: dict[str, torch.Tensor]) -> Iterator[dict]:
    """Yield one row of the table per input and estimate."""
    for name, x in inputs.items():
        x = at_least_fp32(x).reshape(-1, x.shape[-1])
        for estimate, (p, estimator) in ESTIMATES.items():
            rms = RMSEstimate(p, estimator, EPS, NVFP4.block_size)
            xhat = scale_rows(x, inverse_rms(x, rms, get_recipe("unquantized")))
            static, dynamic = static_tensor_scale(x.shape[1], p, estimator), dynamic_tensor_scale(xhat)
            static_db, static_worst, static_floor = measure(xhat, static)
            dynamic_db, dynamic_worst, dynamic_floor = measure(xhat, dynamic)
            yield {
                "input": name,
                "D": x.shape[1],
                "estimate": estimate,
                "static scale": static,
                "static / dynamic": static / dynamic.item(),
                "static dB": static_db,
                "dynamic dB": dynamic_db,
                "cost dB": round(dynamic_db - static_db, 2) + 0.0,  # no negative zeros
                "static 1% dB": static_worst,
                "dynamic 1% dB": dynamic_worst,
                "static at floor": static_floor,
                "dynamic at floor": dynamic_floor,
            }


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--columns", type=int, nargs="*", default=[256, 1024, 4096, 16384], help="lengths of random rows"
    )
    parser.add_argument("--activations", metavar="FILE", nargs="+", default=[], help="tensors written by torch.save")
    parser.add_argument("--train", metavar="STEPS", type=int, default=0, help="first train a small Llama 3")
    parser.add_argument("--json", metavar="FILE", help="also write the results to a file")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = (options := parser()).parse_args(argv)
    if wrong := [columns for columns in args.columns if columns < 64 or columns % NVFP4.block_size]:
        options.error(f"--columns {wrong[0]}: expected multiples of {NVFP4.block_size}, at least 64")
    machine = benchmarking.machine("cpu")
    print(benchmarking.describe(machine))
    sources = [drawn(columns) for columns in args.columns] + [loaded(path) for path in args.activations]
    if args.train:
        sources.append(trained(args.train))
    rows = [row for inputs in sources for row in compare(inputs)]
    print(benchmarking.table(rows, COLUMNS))
    if args.json:
        benchmarking.write_json(args.json, {**machine, "seed": SEED, "eps": EPS, "rows": rows})


if __name__ == "__main__":
    main()
