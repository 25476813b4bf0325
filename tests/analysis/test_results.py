import math
import os
from pathlib import Path

import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.results import WINDOW, read_results, read_sources, result_of, spikes
from mxtrain.errors import ConfigError
from mxtrain.run_folder.comparison import PairedRun, write_comparison
from tests.support.paired_runs import make_run


def test_a_validation_before_the_last_step_has_its_own_step(tmp_path):
    result = result_of(load_run(make_run(tmp_path / "a", [4.0, 3.0, 2.0], validation={1: 3.5, 2: 2.5})))
    assert (result.steps, result.validation, result.validation_step) == (3, 2.5, 2)


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


def test_rows_of_a_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("lr,seed,steps,variant,last_10_percent,validation\n1e-3,0,10,a,2.5,\n1e-3,1,10,a,nan,2.0\n")
    first, diverged = read_results(path)
    assert (first.tail, first.validation, first.tokens, first.name) == (2.5, None, None, "a.csv, line 2")
    assert math.isnan(diverged.tail) and diverged.problem == "its loss is not finite"


@pytest.mark.parametrize(
    "row, problem",
    [
        ("1e-3,one,10,a,2.5,", "seed = 'one' is not a number"),
        ("1e-3,0,,a,2.5,", "steps is empty"),
        ("1e-3", "variant is empty"),
        ("nan,0,10,a,2.5,", "lr = nan is not finite"),
        ("1e-3,0,10,a,2.5,,1e-3,1,10,a,2.5,", "it has more values than the header has columns"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error_with_its_line(tmp_path, row, problem):
    path = tmp_path / "a.csv"
    path.write_text(f"lr,seed,steps,variant,last_10_percent,validation\n1e-3,0,10,a,2.5,\n{row}\n")
    with pytest.raises(ConfigError, match=f"a.csv, line 3: {problem}"):
        read_results(path)


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


def found(*paths):
    results, notes = read_sources(list(map(Path, paths)))
    return [(result.name, result.variant, result.seed, result.lr) for result in results], notes


def test_runs_done_by_hand_are_told_apart_by_their_settings(tmp_path):
    make_run(tmp_path / "a", [3.0], lr=3e-4)
    make_run(tmp_path / "b", [3.0], seed=1, p=1)
    make_run(tmp_path / "c", [3.0], seed=1, settings={"optimizer": {"beta2": 0.99}})
    make_run(tmp_path / "d", [3.0, 2.0], seed=2, settings={"job": {"description": "long"}})
    expected = [
        ("a", "mxnorm mxfp8 p=2, optimizer.beta2 default", 0, 3e-4),
        ("b", "mxnorm mxfp8 p=1", 1, 1e-3),
        ("c", "mxnorm mxfp8 p=2, optimizer.beta2 0.99", 1, 1e-3),
        ("d", "mxnorm mxfp8 p=2, optimizer.beta2 default", 2, 1e-3),
    ]
    assert found(*(tmp_path / name for name in "abcd")) == (expected, [])
    assert found(tmp_path) == (expected, [])  # a folder of runs


def test_a_comparison_names_its_variants_and_what_is_missing_is_a_line(tmp_path):
    folder = tmp_path / "compared"
    make_run(folder / "x-seed0", [3.0])
    (folder / "y-seed0").mkdir()
    runs = [PairedRun(f"{name}-seed0", name, ["a.toml"], "") for name in ("x", "y", "z")]
    write_comparison(folder, {run.name: run for run in runs})
    results, notes = found(folder)
    assert results == [("x-seed0", "x", 0, 1e-3)]
    assert f"{folder}/y-seed0/metrics.jsonl does not exist" in notes[0] and f"'{folder}/z-seed0' does" in notes[1]


def test_a_folder_may_hold_comparisons_beside_runs(tmp_path):
    make_run(tmp_path / "run", [3.0])
    make_run(tmp_path / "compared" / "x-seed0", [3.0])
    write_comparison(tmp_path / "compared", {"x-seed0": PairedRun("x-seed0", "x", ["a.toml"], "")})
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged" / "comparison.json").write_text("[")
    results, notes = found(tmp_path)
    assert results == [("x-seed0", "x", 0, 1e-3), ("run", "mxnorm mxfp8 p=2", 0, 1e-3)]
    assert len(notes) == 1 and "damaged/comparison.json is not valid JSON" in notes[0]


def test_variants_of_comparisons_that_mean_other_settings_by_one_name_are_told_apart(tmp_path):
    for parent, beta in (("a", 0.5), ("b", 0.8), ("c", 0.5)):
        runs = [PairedRun(f"{v}-seed{seed}", v, ["a.toml"], "") for v in ("base", "x") for seed in (0, 1)]
        for run in runs:
            settings = {"optimizer": {"beta1": beta if run.variant == "x" else 0.9}}
            make_run(tmp_path / parent / run.name, [3.0], seed=int(run.name[-1]), settings=settings)
        write_comparison(tmp_path / parent, {run.name: run for run in runs})
    assert [variant for _, variant, *_ in found(tmp_path / "a", tmp_path / "c")[0]] == ["base", "base", "x", "x"] * 2
    results, notes = found(tmp_path / "a", tmp_path / "b")
    expected = [name for beta in (0.5, 0.8) for name in ["base"] * 2 + [f"x, optimizer.beta1 {beta}"] * 2]
    assert [variant for _, variant, *_ in results] == expected and notes == []


def test_in_a_folder_of_runs_one_that_failed_before_its_first_step_is_a_line_and_an_imported_model_none(tmp_path):
    make_run(tmp_path / "a", [3.0])
    (make_run(tmp_path / "b", [3.0], seed=1) / "metrics.jsonl").unlink()
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported" / "config.toml").write_text("")
    results, notes = found(tmp_path)
    assert [name for name, *_ in results] == ["a"] and len(notes) == 1 and "b/metrics.jsonl does not exist" in notes[0]


def test_a_folder_that_may_not_be_searched_is_a_line(tmp_path, monkeypatch):
    make_run(tmp_path / "a", [3.0])
    locked, stat = tmp_path / "b", os.stat
    locked.mkdir()

    def no_stat_inside(path, *args, **kwargs):
        if str(path).startswith(f"{locked}{os.sep}"):
            raise PermissionError(13, "Permission denied", str(path))
        return stat(path, *args, **kwargs)

    monkeypatch.setattr(os, "stat", no_stat_inside)
    results, notes = found(tmp_path / "a", locked)
    assert [name for name, *_ in results] == ["a"] and len(notes) == 1 and str(locked) in notes[0]


def test_csv_files_and_folders_come_together_and_what_cannot_be_read_is_a_line(tmp_path):
    make_run(tmp_path / "a", [3.0])
    (tmp_path / "r.csv").write_text("variant,lr,seed,steps,last_10_percent\nx,1e-3,0,10,2.5\n")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "comparison.json").write_text('[{"name": 1}]')
    names, notes = found(tmp_path / "a", tmp_path / "gone", tmp_path / "bad", tmp_path / "r.csv")
    assert [name for name, *_ in names] == ["a", "r.csv, line 2"]
    assert "does not exist" in notes[0] and "is damaged" in notes[1] and len(notes) == 2


NOISE = [0.01, -0.01, 0.02, -0.02, 0.0]  # median absolute deviation 0.01, so six deviations are 0.089


def losses(count):
    return [3.0 + NOISE[i % 5] for i in range(count)]


def test_noise_a_falling_loss_and_a_step_down_are_no_spikes():
    assert spikes(losses(200)) == []
    assert spikes([8.0 * 0.98**i for i in range(200)]) == []
    assert spikes(losses(40) + [1.0] * 40) == []


def test_a_spike_is_higher_than_both_limits_and_neighbours_are_one():
    run = losses(60)
    run[30], run[40], run[41], run[50] = 3.08, 3.2, 4.0, 3.3
    assert spikes(run) == [40, 50]
    run[40:51] = [3.15, *losses(10)]  # above 0.1, and above six deviations, but not above their sum
    assert spikes(run) == [40]
    wide = [3.0 + 10 * NOISE[i % 5] for i in range(60)]  # six deviations are 0.89
    wide[40], wide[50] = 3.8, 4.0
    assert spikes(wide) == [50]


def test_a_window_holds_exactly_as_many_losses_as_the_rule_says():
    """The oldest loss of the window decides: with it, half of the losses are high, and the deviation is wide."""
    assert spikes([3.0] * 10 + [2.8] * 10 + [2.95]) == []
    assert spikes([3.0] * 9 + [2.8] * 11 + [2.95]) == [WINDOW]


def test_the_first_losses_and_those_that_are_not_finite_begin_no_spike():
    run = losses(60)
    run[WINDOW - 1], run[30], run[31], run[40] = 9.0, math.nan, math.inf, 9.0
    assert spikes(run) == [40]
    assert spikes([math.nan] * 60) == []
