"""``nvfp4.py`` on a CPU: bytes, peers, checks. Kernels run in Triton's interpreter; nothing is timed."""

import json

import nvfp4 as bench_nvfp4
import pytest
import torch

SECTIONS = bench_nvfp4.SECTIONS

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPE = (32, 48)
PEERS = {
    "norm": ["RMSNorm + torchao", "MXNorm p=2 in PyTorch"],
    "gradient": ["amax dY in PyTorch", *(f"amax + cast dY {form} in PyTorch" for form in ("image", "blocked"))],
    "input": ["amax x rho in PyTorch", *(f"amax + cast x rho {form} in PyTorch" for form in ("image", "blocked"))],
    "weight": [
        f"{passes} in PyTorch"
        for name in ("W", "W gain")
        for passes in (f"amax {name}", f"amax + cast {name} image", f"amax + cast {name} blocked")
    ],
}
AMAX_MODULE = "torchao.prototype.moe_training.nvfp4_training.hadamard_amax_triton"
CAST_MODULE = "torchao.prototype.moe_training.nvfp4_training.hadamard_quantize_row_col_triton"


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """Rows of ``nvfp4.py --check`` by name."""
    folder = tmp_path_factory.mktemp("check")
    torch.manual_seed(0)
    files = ["--json", f"{folder}/a.json", "--plot", f"{folder}/a.png"]
    assert bench_nvfp4.main(["--check", "--shapes", "x".join(map(str, SHAPE)), *files]) == 0
    assert (folder / "a.png").stat().st_size > 0
    return {row["what"]: row for row in json.loads((folder / "a.json").read_text())["rows"]}


def test_kernels_agree_with_the_reference(rows):
    assert len(rows) == 6 + 4 * 5
    assert {row["check"] for row in rows.values()} == {"ok"}
