import json
import math
from pathlib import Path

import pytest

from mxtrain.analysis import Run, load_run
from mxtrain.analysis.runs import labels, names, variant_of
from mxtrain.errors import ConfigError


def make_run(folder, rows, facts=None):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    if facts is not None:
        (folder / "run.json").write_text(json.dumps(facts))
    return folder


def training(losses, **extra):
    return [{"step": step, "loss": loss, **extra} for step, loss in enumerate(losses, start=1)]


def test_a_run_has_facts_and_training_and_validation_rows(tmp_path):
    rows = training([9.0, 8.0]) + [{"step": 1, "validation_loss": 9.5}, {"step": 2, "validation_loss": 8.5}]
    run = load_run(make_run(tmp_path / "a", rows, {"converter": "mxnorm"}))
    assert run.name == "a" and run.facts == {"converter": "mxnorm"} and run.variant == "mxnorm p=None"
    assert run.training == rows[:2] and run.validation == rows[2:]
    assert (run.first_loss, run.last_loss, run.validation_loss) == (9.0, 8.0, 8.5)


def test_numbers_of_a_run(tmp_path):
    rows = training([20.0 - step for step in range(20)])
    for step, row in enumerate(rows):
        # The first 10 % of the rows are slow because of compilation, and row 20 is an outlier.
        row.update(tokens_per_second=1.0 if step < 2 else 1000.0 + step, memory_gib=3.0 if step == 7 else 2.0)
    rows[19]["tokens_per_second"] = 1e9
    run = load_run(make_run(tmp_path / "a", rows))
    assert run.tail_loss == 1.5  # mean of 2 and 1
    assert run.tokens_per_second == 1010.5  # median of 1002 .. 1018 and the spike
    assert run.peak_memory_gib == 3.0


def test_shares_of_few_rows_are_rounded(tmp_path):
    """The first row is left out of the speed, however few there are, and the last two of 17 are about 10 %."""
    rows = training([17.0 - step for step in range(17)], tokens_per_second=1000.0)
    run = load_run(make_run(tmp_path / "a", rows))
    assert run.tail_loss == 1.5  # mean of 2 and 1
    few = training([3.0, 2.0, 1.0])
    for row, rate in zip(few, (1.0, 1000.0, 1002.0)):
        row["tokens_per_second"] = rate
    assert load_run(make_run(tmp_path / "b", few)).tokens_per_second == 1001.0


def test_a_run_of_one_row_without_optional_numbers(tmp_path, monkeypatch):
    monkeypatch.chdir(make_run(tmp_path / "a", training([9.0])))
    run = load_run(".")
    assert run.name == "a"
    assert run.first_loss == run.last_loss == run.tail_loss == 9.0
    assert run.tokens_per_second is None and run.peak_memory_gib is None and run.validation_loss is None
    assert run.facts == {}
    run = load_run(make_run(tmp_path / "b", training([9.0], tokens_per_second=50.0)))
    assert run.tokens_per_second == 50.0


def test_nonfinite_losses_are_kept(tmp_path):
    rows = training([9.0, 8.0, 7.0])
    rows[1] = {"step": 2, "loss": None, "nonfinite": {"loss": "nan"}}
    run = load_run(make_run(tmp_path / "a", rows))
    assert math.isnan(run.training[1]["loss"]) and run.first_nonfinite_step == 2
    assert load_run(make_run(tmp_path / "b", training([9.0]))).first_nonfinite_step is None


MXNORM = {"converter": "mxnorm", "recipe": "mxfp8", "p": 2, "estimator": "pre_round"}
LINEAR = {"converter": "mx_linear", "recipe": "mxfp8", "p": None, "estimator": None}
PLAIN = {"converter": "none", "recipe": None, "p": None, "estimator": None}


@pytest.mark.parametrize(
    ("facts", "variant"),
    [
        ({}, ""),
        (PLAIN, "high precision"),
        (PLAIN | {"converters": ["fused_norm"]}, "high precision, fused_norm"),
        (PLAIN | {"precision": "float32 compute, float32 parameters"}, "fp32"),
        (PLAIN | {"precision": "bfloat16 compute, float32 parameters"}, "bf16"),
        (MXNORM | {"converters": ["mxnorm", "decompose_k_router"]}, "mxnorm mxfp8 p=2, decompose_k_router"),
        (MXNORM | {"p": 1}, "mxnorm mxfp8 p=1"),
        (MXNORM | {"estimator": "post_round"}, "mxnorm mxfp8 p=2 post_round"),
        (MXNORM | {"estimator": "exact"}, "mxnorm mxfp8 exact"),
        (MXNORM | {"recipes": {"wo": "bf16", "w2": "bf16"}}, "mxnorm mxfp8 + 2 by name p=2"),
        (MXNORM | {"mode": "fp8_merged"}, "mxnorm mxfp8 p=2 fp8_merged"),
        (LINEAR | {"mode": "emulated"}, "mx_linear mxfp8"),
        (LINEAR | {"converters": ["fused_norm"], "schedule": ["step 3: bf16 in w2"]},
         "mx_linear mxfp8 + 1 scheduled, fused_norm"),
    ],
)  # fmt: skip
def test_variant(facts, variant):
    assert variant_of(facts) == variant


def test_variants_with_another_optimizer_have_another_name(tmp_path):
    for name, variant in (("AdamW", "mx_linear mxfp8"), ("Muon", "mx_linear mxfp8, Muon")):
        folder = make_run(tmp_path / name, training([9.0]), LINEAR)
        (folder / "config.toml").write_text(f'[optimizer]\nname = "{name}"\n')
        assert load_run(folder).variant == variant


def test_a_folder_without_a_readable_run_is_an_error(tmp_path):
    make_run(tmp_path / "empty", []), make_run(tmp_path / "torn", [{"loss": 1}])
    (make_run(tmp_path / "half", training([9.0])) / "run.json").write_text("{")
    for name, problem in {
        "nowhere": "nowhere.*does not exist", "": "metrics.jsonl does not exist", "empty": "no training step",
        "torn": "no training step", "half": "run.json is not valid JSON",
    }.items():  # fmt: skip
        with pytest.raises(ConfigError, match=problem):
            load_run(tmp_path / name)
    with pytest.raises(ConfigError, match="run.json holds list, not dict"):
        load_run(make_run(tmp_path / "list", training([9.0]), []))


def test_settings_are_read_where_they_can_be(tmp_path):
    folder = make_run(tmp_path / "a", training([9.0]))
    assert load_run(folder).settings == {} and load_run(folder).learning_rate is None
    (folder / "config.toml").write_text("[optimizer]\nlr = 0.001\n")
    assert load_run(folder).settings == {"optimizer": {"lr": 0.001}} and load_run(folder).learning_rate == 0.001
    (folder / "config.toml").write_text("[optimizer")
    assert load_run(folder).settings == {}


P = [MXNORM | {"p": p} for p in (1, 2)]


def named_run(name, facts, settings=None, folder="runs"):
    return Run(name, Path(folder) / name, facts, [{"step": 1, "loss": 9.0}], [], settings or {})


def test_a_name_is_the_folders_or_its_path():
    runs = [named_run("a", {}), named_run("b", {}, folder="x"), named_run("b", {}, folder="y")]
    assert names(runs) == ["a", "x/b", "y/b"]


def test_a_label_has_the_settings_in_which_runs_differ():
    runs = [
        named_run("a", P[0], {"optimizer": {"lr": 1e-3}, "debug": {"seed": 1}, "model": {"flavor": "1B"}}),
        named_run("b", P[1], {"optimizer": {"lr": 2e-3}, "debug": {}, "model": {"flavor": "1B"}}),
        named_run("c", {}, {"model": {"flavor": "1B"}}),
    ]
    assert labels(runs) == [
        "a (mxnorm mxfp8 p=1, lr 0.001, seed 1)",
        "b (mxnorm mxfp8 p=2, lr 0.002, default seed)",
        "c (default lr, default seed)",
    ]
    same = [named_run(name, P[0], {"debug": {"seed": 1}}) for name in "ab"]
    assert labels(same) == ["a (mxnorm mxfp8 p=1)", "b (mxnorm mxfp8 p=1)"]
