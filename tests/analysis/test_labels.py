from pathlib import Path

from mxtrain.analysis import Run
from mxtrain.analysis.labels import labels, names, variants

P = [{"converter": "mxnorm", "recipe": "mxfp8", "p": p, "estimator": "pre_round"} for p in (1, 2)]


def make_run(name, facts, settings=None, folder="runs"):
    return Run(name, Path(folder) / name, facts, [{"step": 1, "loss": 9.0}], [], settings or {})


def test_a_name_is_the_folders_or_its_path():
    runs = [make_run("a", {}), make_run("b", {}, folder="x"), make_run("b", {}, folder="y")]
    assert names(runs) == ["a", "x/b", "y/b"]


def test_a_label_has_the_settings_in_which_runs_differ():
    runs = [
        make_run("a", P[0], {"optimizer": {"lr": 1e-3}, "debug": {"seed": 1}, "model": {"flavor": "1B"}}),
        make_run("b", P[1], {"optimizer": {"lr": 2e-3}, "debug": {}, "model": {"flavor": "1B"}}),
        make_run("c", {}, {"model": {"flavor": "1B"}, "optimizer": "not a table"}),
    ]
    assert labels(runs) == [
        "a (mxnorm mxfp8 p=1, lr 0.001, seed 1)",
        "b (mxnorm mxfp8 p=2, lr 0.002, default seed)",
        "c (default lr, default seed)",
    ]


def test_settings_in_which_runs_agree_are_left_out():
    assert labels([make_run(name, P[0], {"debug": {"seed": 1}}) for name in "ab"]) == [
        "a (mxnorm mxfp8 p=1)",
        "b (mxnorm mxfp8 p=1)",
    ]


def test_a_variant_names_settings_in_tables_one_by_one_and_not_what_changes_no_training():
    guard = {"guard": {"recipe": "bf16"}, "schedule": [{"recipe": "bf16", "modules": ["layers.0", "*.w2"]}]}
    same = {"diagnostics": {"every": 5}, "gather": "quantized"}
    runs = [
        make_run("a", P[1], {"mxnorm": guard}),
        make_run("b", P[1], {"mxnorm": guard | same, "model": {"flavor": "1B"}, "model_args": {"n_layers": 2}}),
        make_run("c", P[1], {}),
    ]
    own = "mxnorm.guard.recipe bf16, mxnorm.schedule[0].modules layers.0 *.w2, mxnorm.schedule[0].recipe bf16"
    without = own.replace("bf16", "default").replace("layers.0 *.w2", "default")
    assert variants(runs) == [f"mxnorm mxfp8 p=2, {text}" for text in (own, own, without)]
    assert variants(runs[:2]) == ["mxnorm mxfp8 p=2"] * 2
