import json
import math

import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.results import COLUMNS, append_results, read_results, result_of, row_of
from mxtrain.errors import ConfigError
from tests.support.paired_runs import make_run


def test_a_run_becomes_a_row_and_the_row_the_same_numbers(tmp_path):
    versions, path = {"torch": "2.11.0"}, tmp_path / "a.csv"
    folder = make_run(tmp_path / "a", [4.0, 3.0], 5, 3.0000001e-4, {2: 3.5}, device="NVIDIA H200", versions=versions)
    (folder / "data.json").write_text(json.dumps({"identity": {"tokenizer": "1" * 64, "train": "2" * 64}}))
    result = result_of(load_run(folder))
    append_results(path, [result])
    append_results(path, [result])
    header, row, again = path.read_text().splitlines()
    assert header == ",".join(COLUMNS) and row == again
    numbers = "0.00030000001,5,2,128,3.5000,2,3.0000,100,1.50"
    hashes = f"{'1' * 12},{'2' * 12},"  # the run was not validated
    assert row == f"2020-09-13,llama3,tiny,mxnorm mxfp8 p=2,{numbers},NVIDIA H200,2.11.0,{hashes}"
    (read, _), notes = read_results(path)
    assert row_of(read) == row_of(result) and not notes
    assert read.text == {"tokenizer": "1" * 12, "train": "2" * 12}
    assert (read.run, read.spikes, result.spikes, result.problem) == (None, None, 0, "")


def test_a_validation_before_the_last_step_has_its_own_step(tmp_path):
    result = result_of(load_run(make_run(tmp_path / "a", [4.0, 3.0, 2.0], validation={1: 3.5, 2: 2.5})))
    assert (result.steps, result.validation, result.validation_step) == (3, 2.5, 2)


def test_rows_are_not_appended_under_other_columns(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("variant,lr,seed,steps,last_10_percent\n")
    with pytest.raises(ConfigError, match="a.csv has the columns 'variant,lr,seed,steps,last_10_percent'; rows are"):
        append_results(path, [result_of(load_run(make_run(tmp_path / "a", [4.0])))])
    assert path.read_text().count("\n") == 1


def test_rows_are_appended_below_a_last_line_without_an_end(tmp_path):
    path, result = tmp_path / "a.csv", result_of(load_run(make_run(tmp_path / "a", [4.0])))
    append_results(path, [result])
    path.write_text(path.read_text().removesuffix("\n"))
    append_results(path, [result])
    (first, second), notes = read_results(path)
    assert row_of(first) == row_of(second) == row_of(result) and not notes


def test_a_csv_may_begin_with_a_byte_order_mark(tmp_path):
    path, result = tmp_path / "a.csv", result_of(load_run(make_run(tmp_path / "a", [4.0])))
    append_results(path, [result])
    path.write_text(path.read_text(), encoding="utf-8-sig")
    append_results(path, [result])
    (first, second), notes = read_results(path)
    assert row_of(first) == row_of(second) == row_of(result) and not notes


def test_two_rows_in_one_line_are_a_note(tmp_path):
    path, result = tmp_path / "a.csv", result_of(load_run(make_run(tmp_path / "a", [4.0])))
    append_results(path, [result, result])
    header, row, again = path.read_text().splitlines()
    path.write_text(f"{header}\n{row}{again}\n")
    assert read_results(path) == ([], [f"{path}, line 2: left out: it has more values than the header has columns"])


def test_what_a_run_does_not_tell_is_empty(tmp_path):
    folder = make_run(tmp_path / "a", [4.0], seed=None, lr=None, tokens_per_step=0)
    (folder / "run.json").unlink()
    result = result_of(load_run(folder))
    assert (result.variant, result.lr, result.seed, result.tokens, result.validation) == ("a", 8e-4, None, None, None)
    (folder / "config.toml").unlink()
    result = result_of(load_run(folder))
    assert (result.lr, result.problem) == (None, "")  # nothing says which rate it had, and how long it was to be


@pytest.mark.parametrize("logged, log_freq, steps, ends_early", [(9, 1, 10, True), (9, 2, 10, False), (3, 1, 3, False)])
def test_a_run_has_ended_when_no_further_step_is_to_be_logged(tmp_path, logged, log_freq, steps, ends_early):
    folder = make_run(tmp_path / "a", [3.0] * logged, steps=steps, settings={"metrics": {"log_freq": log_freq}})
    problem = result_of(load_run(folder)).problem
    assert problem == (f"it ends at step {logged} of {steps}" if ends_early else "")


def test_rows_that_cannot_be_used_are_a_line_each(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text(
        "lr,seed,steps,variant,last_10_percent,validation\n"
        "1e-3,0,10,a,2.5,\n1e-3,one,10,a,2.5,\n1e-3,0,,a,2.5,\n1e-3,0,10,,2.5,\n1e-3,1,10,a,nan,2.0\n1e-3\nnan,0,10,a,2.5,\n"
    )
    (first, diverged), notes = read_results(path)
    assert (first.tail, first.validation, first.tokens, first.name) == (2.5, None, None, "a.csv, line 2")
    assert math.isnan(diverged.tail) and diverged.problem == "its loss is not finite"
    problems = ["seed = 'one' is not a number", "steps is empty", "variant is empty", "variant is empty"]
    problems.append("lr = nan is not finite")
    assert notes == [f"{path}, line {n}: left out: {p}" for n, p in zip((3, 4, 5, 7, 8), problems, strict=True)]


@pytest.mark.parametrize(
    "content, problem",
    [("a,b\n1,2\n", "has no column 'variant'"), ("", "has no column"), (b"\xff\xfe\x00", "is not a CSV file")],
)
def test_a_file_that_is_no_csv_of_results_is_an_error(tmp_path, content, problem):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=problem):
        read_results(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_results(tmp_path / "gone.csv")
