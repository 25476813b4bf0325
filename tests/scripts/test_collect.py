import importlib
import json
import re
import sys
from pathlib import Path

import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.comparison import COLUMNS, compare, read_results, row_of
from mxtrain.analysis.comparison_figures import differences_svg
from mxtrain.errors import ConfigError
from tests.support.paired_runs import make_run

ROOT = Path(__file__).parents[2]
EVIDENCE = ROOT / "scripts" / "evidence"
sys.path.insert(0, str(EVIDENCE))
collect = importlib.import_module("collect")


def test_runs_are_appended_and_what_is_no_result_is_a_line(tmp_path, capsys):
    folders = [make_run(tmp_path / "a", [3.0], 1), make_run(tmp_path / "b", [3.0], steps=2), tmp_path / "gone"]
    diverged = make_run(tmp_path / "c", [float("nan")], 2)
    csv = tmp_path / "all.csv"
    assert collect.main([str(csv), *map(str, folders)]) == collect.main([str(csv), str(diverged)]) == 0
    results = read_results(csv)
    assert [(row["seed"], row["problem"]) for row in results] == [(1, ""), (2, "its loss is not finite")]
    unfinished, gone = capsys.readouterr().err.splitlines()
    assert unfinished.endswith("b: skipped: it ends at step 1 of 2") and "gone: skipped: " in gone


def test_a_run_whose_weights_are_not_finite_is_a_row_that_does_not_count(tmp_path):
    """Its last logged loss is from before the update that lost the weights."""
    lost = make_run(tmp_path / "lost", [4.0, 3.0], 1, validation={2: 3.1}, steps=9)
    with (lost / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "event": "weights are not finite", "time": 1.0}\n')
    csv = tmp_path / "all.csv"
    assert collect.main([str(csv), str(make_run(tmp_path / "a", [4.0, 3.0, 3.0])), str(lost)]) == 0
    results = read_results(csv)
    assert [(row["seed"], row["problem"]) for row in results] == [(0, ""), (1, "its loss is not finite")]
    (group,) = compare(results)
    assert "does not count: its loss is not finite" in group.notes[0] and group.cells["count"].tolist() == [1]


def test_a_run_that_shared_its_gpu_has_no_speed(tmp_path):
    run = make_run(tmp_path / "a", [4.0, 3.0, 3.0])
    for csv, options in ((tmp_path / "own.csv", []), (tmp_path / "shared.csv", ["--no-speed"])):
        assert collect.main([str(csv), str(run), *options]) == 0
    (own,), (shared,) = (read_results(tmp_path / name) for name in ("own.csv", "shared.csv"))
    assert own["tokens_per_second"] and shared == own | {"name": shared["name"], "tokens_per_second": None}


@pytest.mark.parametrize("table", sorted(EVIDENCE.glob("*.csv")), ids=lambda path: path.stem)
def test_the_committed_tables_are_read_whole_and_their_pictures_are_up_to_date(table, tmp_path):
    results = read_results(table)
    collect.append_results(tmp_path / "again.csv", results)
    assert table.read_text() == (tmp_path / "again.csv").read_text()
    pictures = [path.read_text() for path in sorted((EVIDENCE / table.stem).glob("differences*.svg"))]
    baseline = re.search("minus that of (.*?):<", pictures[0])[1]
    drawn = [differences_svg(group) for group in compare(results, baseline)]
    numbers = [re.findall(r">\[?[-+]\d\.\d{4}.*?<", picture) for picture in (*pictures, *drawn)]
    again = "draw them again with the command in scripts/evidence/README.md"
    assert numbers[0] and numbers[: len(drawn)] == numbers[len(pictures) :], again


def test_the_figures_of_the_page_follow_from_the_committed_tables():
    """Of its three tables of pairs: mean validation, mean difference and interval."""
    page = (EVIDENCE / "README.md").read_text()
    found = set()
    for name, baseline in (("llama3_125m", "mx_linear mxfp8"), ("qwen3_126m", "bf16, decompose_k_router")):
        for group in compare(read_results(EVIDENCE / f"{name}.csv"), baseline):
            for cell in group.cells.itertuples():
                if one := cell.validation_difference:
                    for digits in (3, 4):
                        interval = f"[{one.low:+.{digits}f}, {one.high:+.{digits}f}]"
                        found.add((f"{cell.validation.mean:.4f}", f"{one.mean:+.4f} {interval}"))
    rows = re.findall(r"^\| [^|]*\| (\d\.\d{4}) \| ([-+]\d\.\d{4} \[.*?\]) \|", page, flags=re.MULTILINE)
    assert len(rows) == 11 and set(rows) <= found, set(rows) - found


def test_a_run_becomes_a_row_and_the_row_the_same_numbers(tmp_path):
    versions, path = {"torch": "2.11.0"}, tmp_path / "a.csv"
    folder = make_run(tmp_path / "a", [4.0, 3.0], 5, 3.0000001e-4, {2: 3.5}, device="NVIDIA H200", versions=versions)
    (folder / "data.json").write_text(json.dumps({"identity": {"tokenizer": "1" * 64, "train": "2" * 64}}))
    result = row_of(load_run(folder))
    collect.append_results(path, [result])
    collect.append_results(path, [result])
    header, row, again = path.read_text().splitlines()
    assert header == ",".join(COLUMNS) and row == again
    numbers = "0.00030000001,5,2,128,3.5000,2,3.0000,100,1.50"
    hashes = f"{'1' * 12},{'2' * 12},"  # the run was not validated
    assert row == f"2020-09-13,llama3,tiny,mxnorm mxfp8 p=2,{numbers},NVIDIA H200,2.11.0,{hashes}"
    read, _ = read_results(path)
    assert collect.cells_of(read) == collect.cells_of(result)
    assert [read[key] for key in ("tokenizer", "train_text", "validation_text")] == ["1" * 12, "2" * 12, ""]
    assert result["problem"] == ""


def test_rows_are_not_appended_under_other_columns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("variant,lr,seed,steps,last_10_percent\n")
    with pytest.raises(ConfigError, match="a.csv has the columns 'variant,lr,seed,steps,last_10_percent'; rows are"):
        collect.append_results(path, [row_of(load_run(make_run(tmp_path / "a", [4.0])))])
    assert path.read_text().count("\n") == 1


@pytest.mark.parametrize("end, encoding", [("", "utf-8"), ("\n", "utf-8-sig")])
def test_rows_are_appended_to_what_an_editor_has_saved(tmp_path, end, encoding):
    path, result = tmp_path / "a.csv", row_of(load_run(make_run(tmp_path / "a", [4.0])))
    collect.append_results(path, [result])
    path.write_text(path.read_text().removesuffix("\n") + end, encoding=encoding)
    collect.append_results(path, [result])
    first, second = read_results(path)
    assert collect.cells_of(first) == collect.cells_of(second) == collect.cells_of(result)
