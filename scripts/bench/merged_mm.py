"""Products of mode "fp8_merged" against bf16's: errors, and on a GPU their speed.

    python scripts/bench/merged_mm.py
    python scripts/bench/merged_mm.py --shapes 8192x4096x4096 --json merged.json

A shape is MxNxK. One operand has a scale for 1 x 128 elements, the other one for 128 x 128: b as in fprop and dgrad,
a as in wgrad, whose M is a multiple of 128. "outliers" multiplies 1 of 200 features of a by 64.

Columns: "merging" is the error of an exact product because codes were rounded once more. "sums" is that of the product
against fp64 on the same codes with fp32 results, "bf16" with bf16 results, as in training. All are relative, in
Frobenius norms. "x bf16" is the speed relative to bf16's product.
"""

import argparse
from itertools import product

import benchmarking
import torch

from mxtrain.formats.matrices import Codes
from mxtrain.formats.mx import merged
from mxtrain.formats.mx.reference import cast, dequantize
from mxtrain.formats.mxfp8 import MXFP8

SHAPES = ("4096x4096x4096", "16384x4096x4096", "16384x14336x4096", "16384x2048x2048", "65536x768x768", "1000x256x768")
COLUMNS = {"shape": "<", "features": "<", "tiles": "<", "merging": ".2e", "sums": ".2e", "bf16": ".2e"}
TIMES = {"TFLOP/s": ".0f", "bf16 TFLOP/s": ".0f", "x bf16": ".2f"}


def relative(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm())


def measure(m: int, n: int, k: int, features: str, tiles: str, device: str) -> dict:
    """Return the row of one case."""
    a, b = torch.randn(m, k, device=device), torch.randn(n, k, device=device)
    if features == "outliers":
        a[:, torch.randperm(k, device=device)[: max(1, k // 200)]] *= 64
    own = [Codes(*cast(x, MXFP8, "rceil")) for x in (a, b)]
    operands = [merged.merge(codes, name == tiles) for codes, name in zip(own, "ab")]
    before = [dequantize(codes.data, codes.scales, MXFP8).double() for codes in own]
    after = [merged.values_of(operand, torch.float32).double() for operand in operands]
    exact = after[0] @ after[1].t()
    (a, a_scales), (b, b_scales) = (operand[:2] for operand in operands)

    def run(dtype: torch.dtype) -> torch.Tensor:
        return merged.merged_mm(a, b.t(), a_scales, b_scales, dtype)

    row = {"shape": f"{m}x{n}x{k}", "features": features, "tiles": tiles}
    row |= {"merging": relative(exact, before[0] @ before[1].t())}
    row |= {"sums": relative(run(torch.float32), exact), "bf16": relative(run(torch.bfloat16), exact)}
    if device == "cuda":
        images = [merged.values_of(operand, torch.bfloat16) for operand in operands]
        times = [
            benchmarking.bench_ms(call) for call in (lambda: run(torch.bfloat16), lambda: images[0] @ images[1].t())
        ]
        own_speed, bf16 = (2e-9 * m * n * k / ms for ms in times)
        row |= {"TFLOP/s": own_speed, "bf16 TFLOP/s": bf16, "x bf16": own_speed / bf16}
    return row


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", default=SHAPES)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    rows = []
    for shape, features, tiles in product(options.shapes, ("gauss", "outliers"), "ba"):
        m, n, k = map(int, shape.split("x"))
        if tiles == "b" or m % 128 == 0:
            rows.append(measure(m, n, k, features, tiles, device))
    facts = benchmarking.machine(device)
    print(
        benchmarking.describe(facts), benchmarking.table(rows, COLUMNS | (TIMES if device == "cuda" else {})), sep="\n"
    )
    if options.json:
        benchmarking.write_json(options.json, {**facts, "rows": rows})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
