from pathlib import Path

from mxtrain.analysis import Run
from mxtrain.analysis.labels import labels, names

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
