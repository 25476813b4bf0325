"""``scripts/bench/write_plans.py`` in a dry run: which rows it times and what it writes."""

import pytest
import torch
import write_plans

from mxtrain.kernels import plan_table
from mxtrain.kernels.device import INTERPRETED
from mxtrain.kernels.norm.rms_norm_plan import FORWARD, ForwardSettings
from mxtrain.kernels.plan_table import H200, Row, read, rows_of, write
from mxtrain.kernels.router.decompose_k_plan import ALONG_K, Plan

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="a dry run is for CPUs")


def run(*arguments):
    assert write_plans.main([*map(str, arguments), "--dry-run"]) == 0


@pytest.fixture
def made_up(monkeypatch):
    """{warps: us}, which a test may change; 12 us for any other number of warps."""
    times = {4: 8.0, 2: 7.92}
    monkeypatch.setattr(write_plans.Bench, "time", lambda self, settings: times.get(settings.warps, 12.0))
    return times


def test_rows_are_timed_in_turn_and_the_others_kept(tmp_path, made_up, capsys):
    """A faster plan must be 2 % faster. Another run goes on where the last one ended."""
    path = tmp_path / "rms_norm_forward.csv"
    ranges = [((1, None), (n, n + 99)) for n in (1, 101, 201)]
    rows = [Row(each, (8, each[1][1]), ForwardSettings(True, 2048, 4)) for each in ranges]
    write(FORWARD, path, rows, "")
    run("rms_norm_forward", "--output", tmp_path, "--shapes", "8x150")
    written = read(FORWARD, path)
    assert written == (rows[0], rows[1]._replace(us=8.0, us_before=8.0), rows[2]), "1 % is not worth it"
    made_up[2] = 7.0
    run("rms_norm_forward", "--output", tmp_path)
    faster = [row._replace(settings=row.settings._replace(warps=2), us=7.0, us_before=8.0) for row in rows]
    assert read(FORWARD, path) == (faster[0], written[1], faster[2]), "only rows without a time"
    out = capsys.readouterr().out
    assert "2 of 2 rows timed, 2 changed; 0 of 3 have no time" in out
    run("rms_norm_forward", "--output", tmp_path, "--again", "--seconds", "0")
    assert read(FORWARD, path) == (faster[0], written[1], faster[2]), "the time is up"
    run("rms_norm_forward", "--output", tmp_path, "--again")
    again = faster[0]._replace(us_before=7.0), faster[1], faster[2]._replace(us_before=7.0)
    assert read(FORWARD, path) == again
    text = path.read_text().splitlines()
    assert text[0].startswith("# Plans of rms_norm_forward") and f"torch {torch.__version__}" in text[1]
    with pytest.raises(SystemExit, match="8x301 is in no row"):
        run("rms_norm_forward", "--output", tmp_path, "--shapes", "8x301")


@pytest.mark.usefixtures("made_up")
def test_a_product_gets_a_new_row(tmp_path):
    before = rows_of(ALONG_K, H200)
    run("decompose_k", "--output", tmp_path, "--shapes", "100x250x7000")
    rows = read(ALONG_K, tmp_path / "decompose_k.csv")
    (new,) = (row for row in rows if row.at == (128, 250, 7168))
    assert new.ranges == ((65, 128), (235, 250), (6145, 7168)) and new.us is not None
    assert new.settings == Plan("triton", 8, 64, 32, 64, 4, 8)
    assert {row.at for row in rows} == {row.at for row in before} | {new.at}


@pytest.mark.usefixtures("made_up")
def test_a_gpu_without_a_table_starts_with_the_h200s_ranges(tmp_path, monkeypatch):
    gpu = plan_table.GPU("RTX", (), 58, 99 * 1024)
    monkeypatch.setattr(plan_table, "gpu_of", lambda device: gpu)
    run("rms_norm_backward", "--output", tmp_path, "--shapes", "8192x4096")
    written = read(write_plans.rms_norm_plan.BACKWARD, tmp_path / "rms_norm_backward.csv")
    shipped = rows_of(write_plans.rms_norm_plan.BACKWARD, H200)
    assert [row.ranges for row in written] == [row.ranges for row in shipped]
    assert [row.at for row in written if row.us is not None] == [(8192, 4096)]
    assert all(row.settings == write_plans.rms_norm_plan.backward_rule(row.at[1]) for row in written if row.us is None)


def test_a_plan_serves_the_longest_rows_of_its_range():
    """In a row for 16384 to 65536 columns, registers that hold 16384 elements do not."""
    gpu = plan_table.GPU("NVIDIA H200", (H200,), 132, 227 * 1024)
    row = Row(((1, None), (16384, 65536)), (4096, 16384), ForwardSettings(False, 4096, 16))
    serves = write_plans.SUBJECTS["rms_norm_forward"].serves
    assert serves(row, gpu, row.settings) and not serves(row, gpu, ForwardSettings(True, 16384, 16))
    row = row._replace(ranges=((1, None), (8193, 16384)))
    assert serves(row, gpu, ForwardSettings(True, 16384, 16))


def test_comparing_two_tables(tmp_path, made_up, capsys):
    made_up[4], made_up[8] = 8.0, 6.0
    row = Row(((1, None), (1, 99)), (8, 64), ForwardSettings(True, 1024, 8))
    other = row._replace(settings=row.settings._replace(warps=4))
    write(FORWARD, tmp_path / "rms_norm_forward.csv", [row], "")
    write(FORWARD, tmp_path / "old.csv", [other], "")
    run("rms_norm_forward", "--output", tmp_path, "--compare", tmp_path / "old.csv")
    assert "8x64: 8.00 -> 6.00 us, 0.750" in capsys.readouterr().out
    run("rms_norm_forward", "--output", tmp_path, "--compare", tmp_path / "rms_norm_forward.csv")
    assert "all 1 rows have the same plan" in capsys.readouterr().out
    assert read(FORWARD, tmp_path / "rms_norm_forward.csv") == (row,), "nothing is written"


def test_every_operation_runs(tmp_path):
    """The kernels themselves, at small sizes."""
    for name, shape in (("rms_norm_forward", "8192x4096"), ("rms_norm_backward", "4096x20480")):
        run(name, "--output", tmp_path, "--shapes", shape)
    for name, shape in (("decompose_k", "1x64x2048"), ("decompose_k_row_major", "16x16x8192")):
        bench = write_plans.Bench(
            write_plans.SUBJECTS[name], tuple(map(int, shape.split("x"))), torch.device("cpu"), True
        )
        for plan in bench.searches[0].starts:
            assert bench.time(plan) > 0


def test_without_a_gpu(capsys):
    assert write_plans.main(["decompose_k"]) == 1
    assert "no CUDA device" in capsys.readouterr().err
