import dataclasses
import json
import math

import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.comparison import compare, estimate, paired_difference, student_t
from mxtrain.analysis.results import Result, result_of
from mxtrain.errors import ConfigError
from tests.support.paired_runs import make_run


def row(variant, seed, validation, tail=2.0, lr=1e-3, **other):
    """A row of a CSV."""
    fields = {"steps": 10, "tokens": 640, "name": f"{variant}{seed}", "model": "llama3", "flavor": "tiny", **other}
    return Result(variant=variant, lr=lr, seed=seed, tail=tail, validation=validation, **fields)


@pytest.fixture
def ran(tmp_path):
    """``ran(name, losses, variant, **settings)``: the result of a run."""
    return lambda name, losses, variant=None, **s: result_of(load_run(make_run(tmp_path / name, losses, **s)), variant)


def test_means_and_paired_differences_by_hand():
    first = [row("mx", 0, 2.570), row("mx", 1, 2.518), row("mx", 0, 3.0, lr=5e-3)]
    second = [row("p2", 1, 2.524, memory_gib=2.0, tokens_per_second=10.0), row("p2", 0, 2.551, memory_gib=3.0)]
    (group,) = compare([*first, *second])
    assert group.baseline == "mx" and group.notes == []
    cells = [(cell.variant, cell.lr, cell.count) for cell in group.cells]
    assert cells == [("mx", 1e-3, 2), ("p2", 1e-3, 2), ("mx", 5e-3, 1)]
    mx, p2, alone = group.cells
    assert mx.validation.mean == pytest.approx(2.544) and mx.validation.error == pytest.approx(0.026)
    assert mx.validation_difference is None
    assert p2.validation_difference.mean == pytest.approx(-0.0065)
    assert p2.validation_difference.interval[1] == pytest.approx(-0.0065 + 12.7062047 * 0.0125)
    assert p2.tail_difference.mean == 0.0
    assert (p2.memory_gib, p2.tokens_per_second, p2.spikes, alone.validation.error) == (3.0, 10.0, None, None)


def test_the_baseline_is_chosen_by_name():
    results = [row("a", 0, 2.0), row("b", 0, 2.5)]
    (group,) = compare(results, "b")
    assert group.cells[0].validation_difference.mean == -0.5 and group.cells[1].validation_difference is None
    with pytest.raises(ConfigError, match="--baseline 'c' is not one of the variants: 'a', 'b'"):
        compare(results, "c")


def test_runs_that_do_not_count_are_named_and_the_rest_is_compared(ran):
    results = [
        ran("a0", [4.0, 3.0], "a"), ran("a1", [4.0, 2.0], "a", seed=1), ran("b0", [4.0, math.nan], "b"),
        ran("b1", [4.0], "b", seed=1, steps=2), ran("b2", [4.0, 2.5], "b", seed=2), ran("c0", [4.0, 2.9], "c"),
    ]  # fmt: skip
    (group,) = compare(results)
    assert group.notes == [
        "b0 (b): does not count: its loss is not finite at step 2",
        "b1 (b): does not count: it ends at step 1 of 2",
        "b at learning rate 0.001: no pair with the baseline for seed 2",
    ]
    pairs = {cell.variant: cell.tail_difference and cell.tail_difference.count for cell in group.cells}
    assert pairs == {"a": None, "b": None, "c": 1}
    assert [cell.count for cell in group.cells] == [2, 1, 1]
    with pytest.raises(ConfigError, match="no run has finite losses to compare: b0: its loss is not finite at step 2"):
        compare([results[2]])
    with pytest.raises(ConfigError, match="there are no runs"):
        compare([])


def test_without_a_run_that_has_ended_all_are_compared_where_the_shortest_is(ran):
    results = [ran("a", [5.0, 4.0], "a", steps=9), ran("b", [5.0, 4.5, 4.0], "b", steps=9)]
    (group,) = compare(results)
    assert [r.tail for r in group.results] == [4.0, 4.5]
    assert group.notes[0] == "a (a): it ends at step 2 of 9; no run has ended yet"


def test_rows_of_runs_that_diverged_early_are_named():
    """They are shorter than the others, and so in no group."""
    lost = row("b", 1, math.nan, math.nan, steps=4, tokens=256, problem="its loss is not finite")
    (group,) = compare([row("a", 0, 2.0), row("b", 0, 2.1), lost])
    assert group.notes == ["b1 (b): does not count: its loss is not finite"]


def test_a_validation_loss_that_is_not_finite_does_not_count(ran):
    lost = [ran(f"b{s}", [4.0, 2.0], "b", seed=s, validation={2: loss}) for s, loss in enumerate([2.1, math.nan])]
    (group,) = compare([ran("a0", [4.0, 3.0], "a", validation={2: 2.0}), *lost])
    assert group.notes == ["b1 (b): does not count: its validation loss is not finite at step 2"]
    assert [cell.validation.mean for cell in group.cells] == [2.0, 2.1]


def test_a_loss_that_was_not_finite_for_a_while_does_not_count_in_a_shorter_curve(ran):
    """The curves are cut after step 2, where the loss of b1 is not finite."""
    results = [ran("a0", [4.0, 3.0], "a", steps=9), ran("b0", [4.0, 3.0], "b", steps=9)]
    (group,) = compare([*results, ran("b1", [4.0, math.nan, 3.0], "b", seed=1, steps=9)])
    assert "b1 (b): does not count: its loss is not finite at step 2" in group.notes
    assert [cell.count for cell in group.cells] == [1, 1]


def test_curves_of_different_lengths_are_compared_at_the_last_common_tokens(ran):
    short = ran("short", [5.0, 4.0, 3.0, 2.0], "a", validation={2: 4.5, 4: 2.5})
    long = ran("long", [5.0, 4.2] + [3.2] * 6, "b", validation={1: 9.0, 2: 4.1, 8: 1.0}, tokens_per_step=128)
    (group,) = compare([short, long])
    assert group.title == "llama3 tiny, 256 tokens"
    assert [(r.steps, r.tokens, r.tail) for r in group.results] == [(4, 256, 2.0), (2, 256, 4.2)]
    assert [r.validation for r in group.results] == [2.5, 4.1]  # after 256 tokens: steps 4 and 2
    batches, lengths = group.notes
    assert batches == "runs differ in tokens per step (64 in short, 128 in long): they are not paired step by step"
    assert "256 to 1,024 tokens): all are compared after 256 tokens, where short ends" in lengths


def test_validation_is_compared_at_the_last_place_that_all_runs_have(ran):
    first = ran("first", [3.0] * 4, "a", validation={2: 2.2, 4: 2.4})
    second = ran("second", [3.0] * 4, "b", validation={2: 2.1, 3: 2.3})
    never = ran("never", [3.0] * 4, "c")
    (group,) = compare([first, second, never])
    assert [r.validation for r in group.results] == [2.2, 2.1, None]
    early = "validation losses are not from the end: the last common validation was after step"
    assert group.notes == [f"{early} 2 of 4"]
    assert [r.validation_step for r in group.results] == [2, 2, None]
    (group,) = compare([row("a", 0, 2.0, validation_step=10), row("b", 0, 2.0, validation_step=1)])
    assert group.notes == [f"{early} 1 of 10"]
    (group,) = compare([first, ran("third", [3.0] * 4, "b", validation={3: 2.3})])
    assert [r.validation for r in group.results] == [None, None] and "validation is not compared" in group.notes[0]


def test_steps_are_compared_where_tokens_are_not_logged(ran):
    (group,) = compare([ran("a", [3.0, 2.0], "a", tokens_per_step=0), ran("b", [3.0, 2.5, 1.0], "b")])
    assert [r.tail for r in group.results] == [2.0, 2.5] and "after 2 steps" in group.notes[0]


def test_of_two_runs_of_one_variant_rate_and_seed_the_last_counts():
    (group,) = compare([row("a", 0, 2.0, name="x"), row("a", 0, 3.0, name="y"), row("a", 0, 4.0, lr=2e-3, name="z")])
    assert [cell.validation.mean for cell in group.cells] == [3.0, 4.0]
    (note,) = group.notes
    assert note.startswith("x and y have the same variant (a), learning rate and seed: only y")


def test_runs_without_a_seed_count_and_have_no_pair():
    (group,) = compare([row("a", None, 2.0, name="w"), row("b", None, 3.0, name="x"), row("b", None, 5.0, name="y")])
    assert (group.cells[1].validation.mean, group.cells[1].validation_difference) == (4.0, None)
    assert group.cells[1].tail_difference is None
    assert group.notes == ["b at learning rate 0.001: no pair with the baseline for seed none, none"]


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    def results(seed):
        folders = [tmp_path / f"{seed}{name}" / "run" for name in "ab"]
        return [result_of(load_run(make_run(folder, [3.0], seed=seed)), "a") for folder in folders]

    (group,) = compare(results(None))
    assert group.cells[0].count == 2
    (group,) = compare(results(0))
    assert group.notes[0].startswith(f"{tmp_path}/0a/run and {tmp_path}/0b/run have the same variant (a)")


def test_a_mean_of_some_of_the_runs_is_none():
    """The number beside it is that of all runs of the cell."""
    (group,) = compare([row("a", 0, 2.0), row("a", 1, None)])
    (cell,) = group.cells
    assert (cell.count, cell.validation, cell.tail.count) == (2, None, 2)


def test_numbers_of_longer_curves_are_those_of_the_part_that_is_compared(ran, tmp_path):
    folder = make_run(tmp_path / "long", [3.0] * 30 + [9.0, 3.0], lr=1e-3)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    for r in rows[25:]:
        r.update(tokens_per_second=900.0, memory_gib=9.0)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    long = result_of(load_run(folder), "b")
    assert (long.spikes, long.memory_gib) == (1, 9.0)
    (group,) = compare([ran("short", [3.0] * 25, "a"), long])
    assert [(c.spikes, c.tokens_per_second, c.memory_gib) for c in group.cells] == [(0, 100.0, 1.5)] * 2


@pytest.mark.parametrize(
    "settings, effect",
    [
        ({"training": {"seq_len": 64}}, "training.seq_len (default in a, 64 in b): their runs are not paired"),
        ({"data": {"max_bytes": 9}}, "data.max_bytes (default in a, 9 in b): their runs are not paired"),
        ({"data": {"prepared": "x"}}, "data.prepared (default in a, 'x' in b): their runs are not paired"),
        ({"model": {"hf_assets_path": "x"}}, "hf_assets_path (default in a, 'x' in b): their runs are not paired"),
        ({"checkpoint": {"initial_load_path": "x"}}, "(default in a, 'x' in b): their runs do not start from equal"),
        ({"validation": {"steps": 5}}, "validation.steps (default in a, 5 in b): their validation losses are not of"),
        # Of equal curves, the mean of the last 10 steps is above the loss of the last one.
        ({"metrics": {"log_freq": 9}}, "metrics.log_freq (1 in a, 9 in b): their last 10 % and their spikes are"),
    ],
)  # fmt: skip
def test_runs_of_other_settings_are_compared_with_a_note(ran, settings, effect):
    runs = [ran("a0", [3.0], "a"), ran("a1", [3.0], "a", seed=1), ran("b0", [3.0], "b", settings=settings)]
    (group,) = compare(runs)
    (note,) = group.notes
    assert note.startswith("variants differ in ") and effect in note


def test_a_run_that_resumed_with_another_setting_is_compared_with_a_note(tmp_path):
    """Its config.toml, which names its learning rate in the report, has that of the latest start."""
    folder = make_run(tmp_path / "b", [3.0, 2.5], lr=5e-4)
    change = "optimizer.lr changes from 0.001 to 0.0005 at step 2"
    with (folder / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps({"step": 2, "event": text}) + "\n" for text in (change, "guard: bf16")))
    first = result_of(load_run(make_run(tmp_path / "a", [3.0, 2.0], lr=5e-4)), "a")
    (group,) = compare([first, result_of(load_run(folder), "b")])
    assert group.notes == [f"b (b): {change}"]


def test_rows_of_a_table_that_read_other_text_are_compared_with_a_note():
    texts = {"a": {"tokenizer": "t", "train": "1"}, "b": {"tokenizer": "t", "train": "2"}, "without hashes": {}}
    (group,) = compare([Result("seed0", name, 1e-3, 0, 10, 3.0, text=text) for name, text in texts.items()])
    (note,) = group.notes
    assert note == "runs differ in their training text (1 in seed0, 2 in seed0): their runs are not paired step by step"


SAME = {"tokenizer": "t", "train": "t", "validation": "v"}


@pytest.mark.parametrize(
    "a, b, expected",
    [
        ({"identity": SAME | {"train": "1" * 64}}, {"identity": SAME | {"train": "2" * 64}},
         "training text (111111111111 in a, 222222222222 in b): their runs are not paired"),
        # The hash of files of their own is beside those of the training text and of what it holds out.
        ({"identity": SAME, "validation_text": "1" * 64}, {"identity": SAME, "validation_text": "2" * 64},
         "validation text (111111111111 in a, 222222222222 in b): their validation losses are not"),
        # ``validation.steps`` counts batches of every process.
        ({"identity": SAME, "validation_sequences": "32"}, {"identity": SAME, "validation_sequences": "64"},
         "number of sequences per validation (32 in a, 64 in b): their validation losses are not"),
        # A stream has no hash of its text.
        ({"identity": {"tokenizer": "t"}, "stream_version": "1" * 40},
         {"identity": {"tokenizer": "t"}, "stream_version": "2" * 40},
         "version of a stream (111111111111 in a, 222222222222 in b): they may have read other text"),
        ({"identity": {"tokenizer": "t", "held_out": "0.01"}}, {"identity": {"tokenizer": "t"}},
         "share held out of a stream (0.01 in a, none in b): their runs are not paired"),
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
        results.append(result_of(load_run(own), name))
    (group,) = compare(results)
    assert len(group.notes) == (expected is not None)
    assert not expected or f"runs differ in their {expected}" in group.notes[0]


def test_a_row_of_no_steps_is_compared(ran):
    (group,) = compare([dataclasses.replace(ran("a", [3.0]), steps=0)])
    assert [one.name for one in group.results] == ["a"]


@pytest.mark.parametrize("damaged", ["", "[]", "{}", '{"identity": 3}'])
def test_a_damaged_file_of_hashes_is_none(tmp_path, damaged):
    folder = make_run(tmp_path / "a", [3.0])
    (folder / "data.json").write_text(damaged)
    assert load_run(folder).text == {}


def test_models_of_one_flavor_and_with_other_sizes_are_compared_apart(ran):
    results = [
        ran("a", [3.0], "x"), ran("b", [2.0], "x", seed=1, model="qwen3"), ran("c", [1.0], "x"),
        ran("d", [4.0], "x", settings={"model_args": {"n_layers": 2}}),
    ]  # fmt: skip
    titles = ["llama3 tiny, 64 tokens", "qwen3 tiny, 64 tokens", "llama3 tiny n_layers=2, 64 tokens"]
    assert [group.title for group in compare(results)] == titles


def test_other_models_and_rows_of_other_lengths_are_compared_apart():
    results = [row("a", 0, 2.0), row("b", 0, 1.0, flavor="1B"), row("a", 0, 1.5, tokens=6400), row("b", 0, 2.2)]
    groups = compare(results, "a")
    titles = ["llama3 tiny, 640 tokens", "llama3 1B, 640 tokens", "llama3 tiny, 6,400 tokens"]
    assert [group.title for group in groups] == titles
    assert [[r.variant for r in group.results] for group in groups] == [["a", "b"], ["b"], ["a"]]
    assert groups[1].notes == ["no run of the baseline 'a' counts here: differences are to 'b'"]


def test_the_baseline_is_the_first_variant_also_where_its_first_run_does_not_count(ran):
    results = [ran("a0", [4.0], "a", steps=2), ran("b0", [4.0, 2.0], "b"), ran("a1", [4.0, 3.0], "a", seed=1)]
    assert compare([*results, ran("b1", [4.0, 2.0], "b", seed=1)])[0].baseline == "a"
    rows = [row("a", 0, 2.0), row("b", 0, 1.0), row("a", 0, 2.5)]
    (group,) = compare(rows)
    assert group.baseline == "a" and [r.validation for r in group.results] == [2.5, 1.0]
    (group,) = compare(results[:2])
    assert "no run of the baseline 'a' counts here: differences are to 'b'" in group.notes


def test_a_run_without_a_seed_that_is_named_twice_counts_once(tmp_path):
    make_run(tmp_path / "one", [4.0, 3.0], seed=None)
    (tmp_path / "link").symlink_to("one")
    (group,) = compare([result_of(load_run(tmp_path / name), "a") for name in ("one", "link")])
    assert [cell.count for cell in group.cells] == [1]
    assert "have the same variant (a), learning rate and seed" in group.notes[0]


def test_a_mean_its_standard_error_and_its_interval_by_hand():
    one = estimate([2.5])
    assert (one.mean, one.count, one.error, one.interval) == (2.5, 1, None, (2.5, 2.5))
    assert estimate([]) is None
    found = estimate([1.0, 2.0, 4.0, 5.0])  # deviations -2, -1, 1, 2: variance 10/3
    assert (found.mean, found.count) == (3.0, 4)
    assert found.error == pytest.approx((10 / 3 / 4) ** 0.5)
    assert found.interval == pytest.approx((3.0 - 3.182446 * 0.9128709, 3.0 + 3.182446 * 0.9128709), abs=3e-6)


def test_a_paired_difference_takes_the_seeds_that_both_have():
    p2 = {0: 2.551, 1: 2.524, 7: 9.0}
    found = paired_difference(p2, {0: 2.570, 1: 2.518, 8: 1.0})  # -0.019 and +0.006
    assert (found.count, found.mean, found.error) == (2, pytest.approx(-0.0065), pytest.approx(0.0125))
    assert found.by_seed == {0: pytest.approx(-0.019), 1: pytest.approx(0.006)}
    assert paired_difference(p2, {3: 1.0}) is None


def test_students_t_of_printed_tables():
    table = {1: 12.7062, 2: 4.3027, 5: 2.5706, 9: 2.2622, 10: 2.2281, 30: 2.0423, 120: 1.9799}
    assert {degrees: student_t(degrees) for degrees in table} == pytest.approx(table, abs=5e-5)
