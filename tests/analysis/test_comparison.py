import json
import math

import pandas as pd
import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.comparison import TEXT, compare, estimate, read_results, row_of
from mxtrain.errors import ConfigError
from tests.support.paired_runs import make_run


def row(variant, seed, validation, tail=2.0, lr=1e-3, **other):
    """A row of a CSV."""
    fields = {"steps": 10, "tokens": 640, "name": f"{variant}{seed}", "model": "llama3", "flavor": "tiny"}
    unknown = dict.fromkeys(["validation_step", "tokens_per_second", "memory_gib"])
    text = {**dict.fromkeys(TEXT, ""), "problem": "", "changes": []}
    own = {"variant": variant, "seed": seed, "lr": lr, "validation": validation, "last_10_percent": tail}
    return unknown | text | fields | own | other


@pytest.fixture
def ran(tmp_path):
    """``ran(name, losses, variant, **settings)``: the row of a run."""
    return lambda name, losses, variant=None, **s: row_of(load_run(make_run(tmp_path / name, losses, **s)), variant)


def cells_of(group):
    return list(group.cells.itertuples())


def test_means_and_paired_differences_by_hand():
    first = [row("mx", 0, 2.570), row("mx", 1, 2.518), row("mx", 0, 3.0, lr=5e-3)]
    second = [row("p2", 1, 2.524, memory_gib=2.0, tokens_per_second=10.0), row("p2", 0, 2.551, memory_gib=3.0)]
    (group,) = compare([*first, *second])
    assert group.baseline == "mx" and group.notes == []
    mx, p2, alone = cells_of(group)
    assert [(c.variant, c.lr, c.count) for c in (mx, p2, alone)] == [("mx", 1e-3, 2), ("p2", 1e-3, 2), ("mx", 5e-3, 1)]
    assert mx.validation.mean == pytest.approx(2.544) and mx.validation.error == pytest.approx(0.026)
    assert mx.validation_difference is None
    assert p2.validation_difference.mean == pytest.approx(-0.0065)
    assert p2.validation_difference.high == pytest.approx(-0.0065 + 12.7062047 * 0.0125)
    assert p2.last_10_percent_difference.mean == 0.0
    assert (p2.memory_gib, p2.tokens_per_second) == (3.0, 10.0)
    assert math.isnan(alone.validation.error)


def test_the_baseline_is_chosen_by_name():
    results = [row("a", 0, 2.0), row("b", 0, 2.5)]
    a, b = cells_of(compare(results, "b")[0])
    assert a.validation_difference.mean == -0.5 and b.validation_difference is None
    with pytest.raises(ConfigError, match="--baseline 'c' is not one of the variants: 'a', 'b'"):
        compare(results, "c")


def test_runs_that_do_not_count_are_named_and_the_rest_is_compared(ran):
    results = [
        ran("a0", [4.0, 3.0], "a"), ran("a1", [4.0, 2.0], "a", seed=1), ran("b0", [4.0, math.nan], "b"),
        ran("b1", [4.0], "b", seed=1, steps=2), ran("b2", [4.0, 2.5], "b", seed=2), ran("c0", [4.0, 2.9], "c"),
        ran("c1", [4.0, 2.0], "c", seed=1, validation={2: math.nan}),
    ]  # fmt: skip
    (group,) = compare(results)
    assert group.notes == [
        "b0 (b): does not count: its loss is not finite at step 2",
        "b1 (b): does not count: it ends at step 1 of 2",
        "c1 (c): does not count: its validation loss is not finite at step 2",
        "b at learning rate 0.001: no pair with the baseline for seed 2",
    ]
    pairs = {c.variant: c.last_10_percent_difference and c.last_10_percent_difference.count for c in cells_of(group)}
    assert pairs == {"a": None, "b": None, "c": 1}
    assert [c.count for c in cells_of(group)] == [2, 1, 1]
    with pytest.raises(ConfigError, match="no run has finite losses to compare: b0: its loss is not finite at step 2"):
        compare([results[2]])
    with pytest.raises(ConfigError, match="no run was given to compare"):
        compare([])


def test_validation_losses_that_are_not_from_the_end_have_a_note():
    (group,) = compare([row("a", 0, 2.0, validation_step=10), row("b", 0, 2.0, validation_step=1)])
    assert group.notes == ["validation losses are not from the end: the last validation was after step 1 of 10"]


def test_of_two_runs_of_one_variant_rate_and_seed_the_last_counts():
    (group,) = compare([row("a", 0, 2.0, name="x"), row("a", 0, 3.0, name="y"), row("a", 0, 4.0, lr=2e-3, name="z")])
    assert [c.validation.mean for c in cells_of(group)] == [3.0, 4.0]
    assert group.notes == ["x does not count: a later one has the same variant, learning rate and seed"]


def test_runs_without_a_seed_count_and_have_no_pair():
    (group,) = compare([row("a", None, 2.0, name="w"), row("b", None, 3.0, name="x"), row("b", None, 5.0, name="y")])
    _, b = cells_of(group)
    assert (b.validation.mean, b.validation_difference, b.last_10_percent_difference) == (4.0, None, None)
    assert group.notes == ["b at learning rate 0.001: no pair with the baseline for seed none, none"]


def test_seeds_that_floats_cannot_tell_apart_are_apart_and_rates_that_are_not_known_are_one():
    rows = [row(name, 2**63 + i, 2.0 + i, lr=None) for i in (0, 1) for name in "ab"]
    (group,) = compare(rows)
    assert group.notes == [] and [c.count for c in cells_of(group)] == [2, 2]
    assert cells_of(group)[1].validation_difference.count == 2


def test_a_mean_of_some_of_the_runs_is_none():
    """The number beside it is that of all runs of the cell."""
    (group,) = compare([row("a", 0, 2.0), row("a", 1, None)])
    (cell,) = cells_of(group)
    assert (cell.count, cell.validation, cell.last_10_percent.count) == (2, None, 2)
    assert group.loss == "last_10_percent"


def test_other_models_and_lengths_are_compared_apart(ran):
    results = [
        row("a", 0, 2.0), row("b", 0, 1.0, flavor="1B"), row("a", 0, 1.5, tokens=6400), row("b", 0, 2.2),
        ran("c", [4.0], "a", settings={"model_args": {"n_layers": 2}}), ran("d", [4.0], "a", tokens_per_step=0),
    ]  # fmt: skip
    groups = compare(results, "a")
    titles = ["tiny, 640 tokens", "1B, 640 tokens", "tiny, 6,400 tokens", "tiny n_layers=2, 64 tokens", "tiny, 1 steps"]
    assert [group.title for group in groups] == [f"llama3 {title}" for title in titles]
    assert [[c.variant for c in cells_of(group)] for group in groups] == [["a", "b"], ["b"], ["a"], ["a"], ["a"]]
    assert groups[1].notes == ["no run of the baseline 'a' counts here: differences are to 'b'"]
    (group,) = compare([row("b", 0, 1.0), row("c", 0, 1.5)], None, ["a", "b", "c"])  # no run of "a" could be read
    assert group.notes[0] == "no run of the baseline 'a' counts here: differences are to 'b'"
    assert [cell.validation_difference is None for cell in cells_of(group)] == [True, False]


def test_a_run_that_resumed_with_another_setting_is_compared_with_a_note(tmp_path):
    folder = make_run(tmp_path / "b", [3.0, 2.5], lr=5e-4)
    change = "optimizer.lr changes from 0.001 to 0.0005 at step 2"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": 2, "event": text}) + "\n" for text in (change, "guard: bf16")))
    first = row_of(load_run(make_run(tmp_path / "a", [3.0, 2.0], lr=5e-4)), "a")
    (group,) = compare([first, row_of(load_run(folder), "b")])
    assert group.notes == [f"b (b): {change}"]


def test_runs_of_other_batches_have_a_note(ran):
    (group,) = compare([ran("a", [3.0] * 4, "a"), ran("b", [3.0] * 2, "b", tokens_per_step=128)])
    assert group.notes == ["runs differ in tokens per step (64 in a, 128 in b): they are not paired step by step"]


SAME = {"tokenizer": "t", "train": "t", "validation": "v"}


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ({"identity": SAME | {"train": "1" * 64}}, {"identity": SAME | {"train": "2" * 64}},
         "training text (111111111111 in a, 222222222222 in b): their runs are not paired"),
        # The hash of files of their own is beside those of the training text and of what it holds out.
        ({"identity": SAME, "validation_text": "1" * 64}, {"identity": SAME, "validation_text": "2" * 64},
         "validation text (111111111111 in a, 222222222222 in b): their validation losses are not"),
        # A run of an earlier version, or one that was not validated. The held-out text may be another.
        ({"identity": {"tokenizer": "t", "train": "t"}},
         {"identity": {"tokenizer": "t", "train": "t", "validation_text": "9"}, "validation_text": "9"}, None),
    ],
)  # fmt: skip
def test_runs_that_read_other_text_are_compared_with_a_note(tmp_path, a, b, expected):
    """Their settings are the same. The hashes of what they read are in data.json."""
    results = []
    for name, content in {"a": a, "b": b, "without": None}.items():
        own = make_run(tmp_path / name, [3.0])
        if content:
            (own / "data.json").write_text(json.dumps(content))
        results.append(row_of(load_run(own), name))
    (group,) = compare(results)
    assert len(group.notes) == (expected is not None)
    assert not expected or f"runs differ in their {expected}" in group.notes[0]


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"identity": 3}'])
def test_a_damaged_file_of_hashes_is_none(tmp_path, damaged):
    folder = make_run(tmp_path / "a", [3.0])
    (folder / "data.json").write_text(damaged)
    assert load_run(folder).text == {}


def test_a_mean_its_standard_error_and_its_interval_by_hand():
    mean, *unknown, count = estimate(pd.Series([2.5]))
    assert (mean, count) == (2.5, 1) and all(map(math.isnan, unknown))
    assert estimate(pd.Series([], dtype=float)) is None
    found = estimate(pd.Series([1.0, 2.0, 4.0, 5.0]))  # deviations -2, -1, 1, 2: variance 10/3
    assert (found.mean, found.count) == (3.0, 4)
    assert found.error == pytest.approx((10 / 3 / 4) ** 0.5)
    assert found[2:4] == pytest.approx((3.0 - 3.182446 * 0.9128709, 3.0 + 3.182446 * 0.9128709), abs=3e-6)
    assert estimate(pd.Series([0.5, 0.5]))[:4] == (0.5, 0.0, 0.5, 0.5)


# Rows of runs and of a CSV


def test_a_validation_before_the_last_step_has_its_own_step(ran):
    found = ran("a", [4.0, 3.0, 2.0], validation={1: 3.5, 2: 2.5})
    assert (found["steps"], found["validation"], found["validation_step"]) == (3, 2.5, 2)


def test_what_a_run_does_not_tell_is_empty(tmp_path):
    folder = make_run(tmp_path / "a", [4.0], seed=None, lr=None, tokens_per_step=0)
    (folder / "run.json").unlink()
    found = row_of(load_run(folder))
    keys = ("variant", "lr", "seed", "tokens", "validation")
    assert [found[key] for key in keys] == ["a", 8e-4, None, None, None]
    (folder / "config.toml").unlink()
    found = row_of(load_run(folder))
    assert (found["lr"], found["problem"]) == (None, "")  # nothing says which rate it had, and how long it was to be


@pytest.mark.parametrize("logged, log_freq, steps, ends_early", [(9, 1, 10, True), (9, 2, 10, False), (3, 1, 3, False)])
def test_a_run_has_ended_when_no_further_step_is_to_be_logged(ran, logged, log_freq, steps, ends_early):
    problem = ran("a", [3.0] * logged, steps=steps, settings={"metrics": {"log_freq": log_freq}})["problem"]
    assert problem == (f"it ends at step {logged} of {steps}" if ends_early else "")


def test_rows_of_a_csv(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("lr,seed,steps,variant,last_10_percent,validation\n1e-3,0,10,NA,2.5,\n1e-3,1,10,a,nan,2.0\n")
    first, diverged = read_results(path)
    keys = ("variant", "last_10_percent", "validation", "tokens", "name", "problem")
    assert [first[key] for key in keys] == ["NA", 2.5, None, None, "a.csv, line 2", ""]
    assert math.isnan(diverged["last_10_percent"]) and diverged["problem"] == "its loss is not finite"


@pytest.mark.parametrize(
    "row, problem",
    [
        ("1e-3,one,10,a,2.5,", ", line 3: seed = 'one' is not a number"),
        ("1e-3,0,,a,2.5,", ", line 3: steps is empty"),
        ("1e-3,0,10,a,2.5,,1e-3,1,10,a,2.5,", ", line 3: the line has more values than the header has columns"),
    ],
)
def test_a_row_that_cannot_be_used_is_an_error_with_its_line(tmp_path, row, problem):
    path = tmp_path / "a.csv"
    path.write_text(f"lr,seed,steps,variant,last_10_percent,validation\n1e-3,0,10,a,2.5,\n{row}\n")
    with pytest.raises(ConfigError, match=f"a.csv{problem}"):
        read_results(path)


@pytest.mark.parametrize(
    "content, problem",
    [
        ("a,b\n1,2\n", "has no column 'variant'; its first line must name"),
        (b"\xff\xfe\x00", "is not a CSV file: "),
    ],
)
def test_a_file_that_is_no_csv_of_results_is_an_error(tmp_path, content, problem):
    path = tmp_path / "a.csv"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=problem):
        read_results(path)
    with pytest.raises(ConfigError, match="gone.csv cannot be read: No such file"):
        read_results(tmp_path / "gone.csv")
