import os
from pathlib import Path

from mxtrain.analysis.results import append_results
from mxtrain.analysis.sources import read_sources
from mxtrain.run_folder.comparison import PairedRun, write_comparison
from tests.support.paired_runs import make_run


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
    assert [note.partition(folder.name)[2].split("'")[0].split(" ")[0] for note in notes] == [
        "/y-seed0/metrics.jsonl",
        "/z-seed0",
    ]


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
    for parent, seeds, betas in (("a", (0, 1), (0.9, 0.5)), ("b", (0, 1), (0.9, 0.8)), ("c", (0,), (0.9, 0.5))):
        runs = [PairedRun(f"{v}-seed{seed}", v, ["a.toml"], "") for v in ("base", "x") for seed in seeds]
        for run in runs:
            seed, beta = int(run.name[-1]), betas[run.variant == "x"]
            make_run(tmp_path / parent / run.name, [3.0], seed=seed, settings={"optimizer": {"beta1": beta}})
        write_comparison(tmp_path / parent, {run.name: run for run in runs})
    assert [variant for _, variant, *_ in found(tmp_path / "a", tmp_path / "c")[0]] == [
        "base",
        "base",
        "x",
        "x",
        "base",
        "x",
    ]
    results, notes = found(tmp_path / "a", tmp_path / "b")
    assert [variant for _, variant, *_ in results] == ["base"] * 2 + ["a/x"] * 2 + ["base"] * 2 + ["b/x"] * 2
    assert notes == []
    make_run(tmp_path / "other" / "a" / "x-seed0", [3.0], settings={"optimizer": {"beta1": 0.8}})
    write_comparison(tmp_path / "other" / "a", {"x-seed0": PairedRun("x-seed0", "x", ["a.toml"], "")})
    assert found(tmp_path / "a", tmp_path / "other" / "a")[0][-1][1] == f"{tmp_path}/other/a/x"


def test_a_run_in_a_folder_of_runs_that_failed_before_its_first_step_is_a_line(tmp_path):
    make_run(tmp_path / "a", [3.0])
    (make_run(tmp_path / "b", [3.0], seed=1) / "metrics.jsonl").unlink()
    results, notes = found(tmp_path)
    assert [name for name, *_ in results] == ["a"] and len(notes) == 1 and "b/metrics.jsonl does not exist" in notes[0]


def test_an_imported_model_in_a_folder_of_runs_is_none(tmp_path):
    make_run(tmp_path / "a", [3.0])
    (tmp_path / "imported").mkdir()
    (tmp_path / "imported" / "config.toml").write_text("")
    results, notes = found(tmp_path)
    assert [name for name, *_ in results] == ["a"] and notes == []


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
    results, _ = read_sources([make_run(tmp_path / "a", [3.0])])
    append_results(tmp_path / "r.csv", results)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "comparison.json").write_text('[{"name": 1}]')
    names, notes = found(tmp_path / "a", tmp_path / "gone", tmp_path / "bad", tmp_path / "r.csv")
    assert [name for name, *_ in names] == ["a", "r.csv, line 2"]
    assert "does not exist" in notes[0] and "is damaged" in notes[1] and len(notes) == 2
