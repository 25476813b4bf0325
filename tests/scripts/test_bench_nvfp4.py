"""``nvfp4.py`` on a CPU: bytes, peers, checks. Kernels run in Triton's interpreter; nothing is timed."""

import argparse
import json

import benchmarking
import kernel_benchmark
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


@pytest.fixture
def entries(monkeypatch):
    """Entries of a section by name. Compiled functions run uncompiled."""
    monkeypatch.setattr(torch, "compile", lambda function, **kwargs: function)
    torch.manual_seed(0)
    return lambda section: {entry.name: entry for entry in SECTIONS[section].entries(SHAPE, DEVICE, True)}


def test_bytes(rows):
    n, rho, gain = 32 * 48, 32 * 4, 48 * 4
    codes, image, tile = n // 2 + n // 16, 2 * n, 128 * 4  # scales in the blocked layout fill tiles of 128 x 4
    expected = {
        "nvfp4_norm p=2 codes": 2 * n + codes + rho,
        "nvfp4_norm p=1 codes": 2 * n + codes + rho,
        "nvfp4_norm exact codes": 2 * n + codes + rho,
        "nvfp4_norm p=2 blocked": 2 * n + n // 2 + tile + rho,
        "nvfp4_norm p=2 image": 2 * n + image + rho,
        "amax dY": 2 * n + 2 * 4,
        "cast dY image": 2 * n + 2 * image,
        "cast dY blocked": 2 * n + 2 * (n // 2 + tile),
        "amax + cast dY image": 2 * 2 * n + 2 * image,
        "amax x rho": 2 * n + rho + 2 * 4,  # and the scale without transform
        "cast x rho blocked": 2 * n + rho + n // 2 + tile,
        "amax + cast x rho image": 2 * (2 * n + rho) + image,
        "amax W": 4 * n + 4,
        "cast W image": 4 * n + image,
        "amax + cast W blocked": 2 * 4 * n + 2 * (n // 2 + tile),
        "cast W gain image": 4 * n + gain + image,
        "amax + cast W gain blocked": 2 * (4 * n + gain) + 2 * (n // 2 + tile),
    }
    assert {name: rows[name]["MB"] for name in expected} == {name: count / 1e6 for name, count in expected.items()}


def test_kernels_agree_with_the_reference(rows):
    assert len(rows) == 6 + 4 * 5
    assert {row["check"] for row in rows.values()} == {"ok"}


def test_the_summary_holds_the_goals_for_codes(entries, monkeypatch):
    """Per estimator: ratio to RMSNorm and torchao's cast, share of the copy bandwidth (here 1 ms and 1 MB per ms)."""
    monkeypatch.setattr(benchmarking, "copy_bandwidth", lambda milliseconds, moved: moved * 1e3)
    args = argparse.Namespace(device=DEVICE, max_autotune=False, check=False, milliseconds=lambda run: 1.0)
    rows = kernel_benchmark.measure_shape("norm", SECTIONS["norm"], SHAPE, args, bandwidth=1e9)
    summary = {line["what"]: line for line in kernel_benchmark.summarise(rows, memory_bound=0)}
    for row in rows:
        if row["what"].endswith("codes"):
            line = summary.pop(row["what"])
            assert row["peer"] == "RMSNorm + torchao, compiled" and line["geomean"] == pytest.approx(1)
            assert line["min of copy"] == pytest.approx(row["MB"])
    assert list(summary) == ["nvfp4_norm p=2 blocked", "nvfp4_norm p=2 image", "nvfp4_norm exact image"]


@pytest.mark.parametrize("section", list(SECTIONS))
def test_peers_are_complete_and_right(section, entries):
    entries = entries(section)
    expected = [f"{peer}, {word}" for peer in PEERS[section] for word in ("compiled", "max-autotune")]
    if section == "gradient":
        expected += [f"{peer}, eager" for peer in PEERS[section] if "cast" in peer]
        expected += ["torchao cast dY", "torchao amax + cast dY"]
    assert {entry.name for entry in entries.values() if not entry.ours} == set(expected)
    for entry in entries.values():
        assert set(entry.peers) <= set(expected)
        alone = entry.name.startswith("cast ") and entry.name != "cast dY blocked"
        assert bool(entry.peers) == (entry.ours and not alone), entry.name
        if not entry.ours and entry.check:
            result = entry.make()()
            assert entry.check(result), entry.name
            if section != "norm" and "cast" in entry.name:
                ours = entries[entry.name.partition(" in PyTorch")[0]]
                assert entry.reads == ours.reads, "peers count the same bytes"


@pytest.mark.parametrize("section", list(SECTIONS))
def test_a_wrong_result_fails_the_check(section, entries):
    """One bit of codes or scales, or 1 % of a maximum, in any tensor."""
    checked = {entry.name: entry for entry in entries(section).values() if entry.check and "autotune" not in entry.name}
    for entry in checked.values():
        if entry.ours and section != "norm":
            continue  # the same functions check the peers
        result = entry.make()()
        assert entry.check(result)
        for tensor in kernel_benchmark.tensors(result):
            right = tensor.clone()
            if tensor.dtype in (torch.uint8, torch.float8_e4m3fn):
                tensor.view(torch.uint8).view(-1)[5] ^= 1
            else:
                tensor.mul_(1.01)
            assert not entry.check(result), entry.name
            tensor.copy_(right)
        assert entry.check(result)
