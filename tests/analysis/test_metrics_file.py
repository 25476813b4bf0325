import json
import math
import shutil

import pytest

from mxtrain.analysis import MetricsWriter, read_metrics
from mxtrain.errors import ConfigError
from mxtrain.files import replace_file


def write(path, rows, steps_done=0):
    writer = MetricsWriter(path, steps_done)
    for row in rows:
        writer.write(row)


def steps(path):
    return [row["step"] for row in read_metrics(path)]


def test_nonfinite_values_are_strict_json_and_are_restored(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": 1, "loss": math.nan, "grad_norm": math.inf, "max_loss": -math.inf, "lr": 0.1}])

    def reject(name):
        raise AssertionError(f"{name} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=reject)
    assert raw["loss"] is None and raw["nonfinite"] == {"loss": "nan", "grad_norm": "inf", "max_loss": "-inf"}
    [row] = read_metrics(path)
    assert math.isnan(row["loss"]) and row["grad_norm"] == math.inf and row["max_loss"] == -math.inf
    assert row["lr"] == 0.1 and "nonfinite" not in row


@pytest.mark.parametrize("how", ["removed", "moved", "replaced"])
def test_rows_go_on_where_a_file_is_gone(tmp_path, how):
    path = tmp_path / "run" / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"step": 1, "loss": 1 / 3})
    assert read_metrics(path) == [{"step": 1, "loss": 1 / 3}], "at once"
    if how == "removed":
        shutil.rmtree(path.parent)
    elif how == "moved":
        path.parent.rename(tmp_path / "moved")
    else:
        replace_file(path, b'{"step": 1, "loss": 7.0}\n')
    for step in (2, 3):
        writer.write({"step": step, "loss": 9.0})
    assert steps(path) == ([1, 2, 3] if how == "replaced" else [2, 3])
    if how == "moved":
        assert steps(tmp_path / "moved" / "metrics.jsonl") == [1]


def test_a_run_that_logs_nothing_keeps_the_file(tmp_path):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": 1, "loss": 9.0}])
    MetricsWriter(path).flush()
    assert steps(path) == [1]


DEEP = pytest.param(b'{"step": 3, "x": ' + b"[" * 100_000, id="deep")


@pytest.mark.parametrize(
    "torn", [b'{"step": 3, "lo', b'{"step": 3', b"{", b'{"loss": 1.0}', b'{"step": 3, "x": "\xc3', DEEP]
)
def test_a_damaged_last_line_is_dropped_by_reader_and_writer(tmp_path, torn):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": 1, "loss": 9.0}, {"step": 2, "loss": 8.0}])
    path.write_bytes(path.read_bytes() + torn)
    assert steps(path) == [1, 2]
    write(path, [{"step": 3, "loss": 7.0}], steps_done=2)  # begins a new line
    assert steps(path) == [1, 2, 3]


def test_any_other_damaged_line_and_a_missing_file_are_errors(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with pytest.raises(ConfigError, match="does not exist"):
        read_metrics(path)
    path.write_text('{"step": 1, "loss": 9.0}\nnonsense\n{"step": 3, "loss": 9.0}\n')
    with pytest.raises(ConfigError, match="metrics.jsonl, line 2"):
        read_metrics(path)


def test_rows_wait_while_the_disk_is_full_and_no_row_is_torn(tmp_path, full_disk):
    path = tmp_path / "metrics.jsonl"
    writer = MetricsWriter(path)
    writer.write({"step": 1, "loss": 9.0})
    with full_disk(path.stat().st_size + 10):  # room for a part of a row
        for step in (2, 3):
            with pytest.raises(OSError, match="File too large"):
                writer.write({"step": step, "loss": 9.0})
            assert steps(path) == [1]
    writer.write({"step": 4, "loss": 9.0})
    assert steps(path) == [1, 2, 3, 4] and len(path.read_bytes().splitlines()) == 4


@pytest.mark.parametrize("another_row", [True, False])
def test_rows_wait_while_the_file_cannot_be_opened(tmp_path, another_row):
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, [{"step": s, "loss": 9.0} for s in range(1, 6)])
    moved = path.parent.rename(tmp_path / "moved")
    path.parent.write_text("a file in place of the folder")
    writer = MetricsWriter(path, steps_done=2)
    for write_again in (lambda: writer.write({"step": 3, "loss": 5.0}), writer.flush):
        with pytest.raises(OSError):
            write_again()
    path.parent.unlink()
    moved.rename(path.parent)
    if another_row:
        writer.write({"step": 4, "loss": 5.0})
    writer.flush()
    expected = [(1, 9.0), (2, 9.0), (3, 5.0), (4, 5.0)][: None if another_row else -1]
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == expected


@pytest.mark.parametrize("steps_done, kept", [(5, [1, 2, 3, 4, 5]), (0, [])])
def test_a_resumed_run_replaces_the_steps_it_repeats_and_a_restarted_one_all(tmp_path, steps_done, kept):
    path = tmp_path / "metrics.jsonl"
    write(path, [{"step": s, "loss": 9.0} for s in range(1, 9)] + [{"step": 8, "validation_loss": 9.0}])
    write(path, [{"step": s, "loss": 5.0} for s in (8, 10)], steps_done)  # logs less often than before
    expected = [(s, 9.0) for s in kept] + [(8, 5.0), (10, 5.0)]
    assert [(row["step"], row["loss"]) for row in read_metrics(path)] == expected
