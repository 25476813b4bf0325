"""Tables of measured plans: the files that ship with mxtrain, reading and writing, and which GPU uses which table."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from mxtrain.kernels import plan_table
from mxtrain.kernels.norm.rms_norm_plan import OPERATIONS as NORMS
from mxtrain.kernels.norm.rms_norm_plan import fit, is_valid
from mxtrain.kernels.plan_table import (
    FOLDER,
    GPU,
    H200,
    Operation,
    Row,
    find,
    folder_name,
    gpu_of,
    read,
    rows_of,
    table_of,
    write,
)
from mxtrain.kernels.router import decompose_k_plan
from mxtrain.kernels.router.decompose_k_plan import ALONG_K, ROW_MAJOR, ranges

NORM_OPERATIONS = [operation for pair in NORMS.values() for operation in pair]
OPERATIONS = {operation.name: operation for operation in (*NORM_OPERATIONS, ALONG_K, ROW_MAJOR)}
FILES = sorted(FOLDER.glob("*/*.csv"))
AN_H200 = GPU("NVIDIA H200", (H200,), 132, 227 * 1024)


class Settings(NamedTuple):
    fast: bool
    width: int
    route: str


OPERATION = Operation("op", 1, ("rows", "columns"), Settings)
ROWS = (
    Row(((1, 4), (1, None)), (4, 8), Settings(True, 8, "mm"), 1.25, 2.5),
    Row(((5, None), (8, 8)), (9, 8), Settings(False, 16, "bmm")),
)


def test_there_is_a_table_for_every_operation():
    assert {path.stem for path in FILES if path.parent.name == H200} == OPERATIONS.keys()


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_shipped_tables(path, tmp_path):
    """Every row can run, no shape is in two rows, and what is read is what would be written."""
    operation = OPERATIONS[path.stem]
    rows = read(operation, path)
    write(operation, tmp_path / "again.csv", rows, "")
    assert read(operation, tmp_path / "again.csv") == rows
    for row, other in itertools.combinations(rows, 2):
        together = [
            low <= (last or low) and first <= (high or first)
            for (first, last), (low, high) in zip(row.ranges, other.ranges)
        ]
        assert not all(together), f"{row.at} and {other.at} share shapes"
    for row in rows:
        assert row.us is None or 0 < row.us <= row.us_before
        if operation in (ALONG_K, ROW_MAJOR):
            assert decompose_k_plan.is_valid(row.settings, 2), row
            # Tuned plans and tables are looked up by the largest product with the same plan.
            assert ranges(*row.at) == tuple(last for _, last in row.ranges), row
            # Kernels without tensor cores take all of K in one step.
            assert not 0 < row.settings.block_m < 16 or row.settings.block_k >= row.ranges[2][1], row
        else:
            for shape in corners(row):
                plan = fit(operation, row.settings, *shape, 2, AN_H200)
                assert is_valid(plan, *shape) and plan.persistent == row.settings.persistent, (row, shape)
            at = fit(operation, row.settings, *row.at, 2, AN_H200)
            assert row.settings.tile % (at.rows * at.columns) == 0, row


def corners(row):
    """Every combination of the ends of a row's ranges."""
    return itertools.product(*((first, last or 10**6) for first, last in row.ranges))


@pytest.mark.parametrize("operation", NORM_OPERATIONS, ids=lambda operation: operation.name)
def test_every_norm_has_a_row(operation):
    edges = {edge for row in rows_of(operation, H200) for edge in row.ranges[1]}
    for rows in (1, 131, 16895, 16896, 2**31):
        for columns in sorted({1, 65536, *edges, *(edge + 1 for edge in edges if edge < 65536)}):
            assert find(operation, H200, (rows, columns)) is not None, (rows, columns)


def test_the_first_row_that_holds_a_shape_is_found(monkeypatch, tmp_path):
    monkeypatch.setattr(plan_table, "FOLDER", tmp_path)
    write(OPERATION, tmp_path / "GPU" / "op.csv", ROWS, "two lines\nof comment")
    text = (tmp_path / "GPU" / "op.csv").read_text().splitlines()
    assert text[:2] == ["# two lines", "# of comment"]
    assert [line.split() for line in text[2:]] == [
        ["rows,", "columns,", "at,", "fast,", "width,", "route,", "us,", "us_before"],
        ["1..4,", "1..,", "4x8,", "yes,", "8,", "mm,", "1.25,", "2.50"],
        ["5..,", "8,", "9x8,", "no,", "16,", "bmm,", "-,", "-"],
    ]
    assert len(set(map(len, text[2:]))) == 1, "aligned"
    found = {shape: find(OPERATION, "GPU", shape) for shape in ((1, 9), (4, 1), (5, 8), (10**6, 8), (5, 9), (5, 7))}
    assert list(found.values()) == [ROWS[0], ROWS[0], ROWS[1], ROWS[1], None, None]
    assert find(OPERATION, None, (1, 9)) is None
    assert plan_table.reason(ROWS[0]) == "measured at 4 x 8: 1.2 us"
    assert plan_table.reason(ROWS[1]) == "not timed yet, to be timed at 9 x 8"


GOOD = "rows, columns, at, fast, width, route, us, us_before\n1..4, 1.., 4x8, yes, 8, mm, 1.5, 2\n"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (GOOD, ""),
        ("width", "height"),
        ("mm, ", ""),
        ("yes", "true"),
        (" 8,", " 8.0,"),
        ("1..4", "..4"),
        ("1..4", "one"),
        ("4x8", "5x8"),
        ("4x8", "4"),
        ("1.5", ""),
    ],
)
def test_tables_that_do_not_parse(old, new, tmp_path):
    path = tmp_path / "op.csv"
    path.write_text(GOOD)
    assert read(OPERATION, path)[0].settings == ROWS[0].settings
    path.write_text(GOOD.replace(old, new))
    with pytest.raises(ValueError, match=r"op\.csv: "):
        read(OPERATION, path)


@pytest.mark.parametrize(
    ("name", "capability", "sms", "own", "table"),
    [
        ("NVIDIA H200", (9, 0), 132, True, H200),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, False, H200),
        ("NVIDIA H100 80GB HBM3", (9, 0), 132, True, "NVIDIA_H100_80GB_HBM3"),
        ("NVIDIA H100 PCIe", (9, 0), 114, False, None),
        ("NVIDIA B200", (10, 0), 148, False, None),
        ("NVIDIA A100-SXM4-80GB", (8, 0), 108, True, "NVIDIA_A100_SXM4_80GB"),
    ],
)
def test_the_table_that_serves_a_gpu(name, capability, sms, own, table, monkeypatch, tmp_path):
    """Its own, or the H200's where the architecture and the number of SMs are the same. Each operation has its own."""
    for folder in {H200, folder_name(name)}:
        (tmp_path / folder).mkdir()
    (tmp_path / H200 / "op.csv").touch()
    if own:
        (tmp_path / folder_name(name) / "op.csv").touch()
    monkeypatch.setattr(plan_table, "FOLDER", tmp_path)
    fake = SimpleNamespace(
        is_available=lambda: True, get_device_name=lambda _: name, get_device_capability=lambda _: capability
    )
    monkeypatch.setattr(torch, "cuda", fake)
    monkeypatch.setattr(plan_table, "sm_count", lambda device: sms)
    monkeypatch.setattr(plan_table, "shared_memory", lambda device: 100)
    gpu = gpu_of.__wrapped__(torch.device("cuda", 0))
    assert (gpu.name, gpu.sms, gpu.shared) == (name, sms, 100)
    assert table_of.__wrapped__(OPERATION, gpu) == table
    other = H200 if (capability, sms) == ((9, 0), 132) else None
    (tmp_path / H200 / "other.csv").touch()
    assert table_of.__wrapped__(OPERATION._replace(name="other"), gpu) == other


def test_without_a_gpu_plans_are_those_of_an_h100(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_of.__wrapped__(torch.device("cuda")) == gpu_of.__wrapped__(torch.device("cpu"))
    assert gpu_of.__wrapped__(torch.device("cpu")) == AN_H200._replace(name="cpu")
