import json
from typing import get_args

import matplotlib.image
import pytest

from mxtrain import cli
from mxtrain.analysis.plots import XAxis
from tests.support.paired_runs import make_run


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Folders "p1" and "p2", and three that cannot be drawn, in the current folder."""
    monkeypatch.chdir(tmp_path)
    for p, end in ((1, 4), (2, 3)):
        make_run(tmp_path / f"p{p}", [9.0 - step / p for step in range(1, end)], p=p, steps=9 if p == 2 else None)
    (tmp_path / "empty").mkdir()
    (tmp_path / "old").mkdir()
    (tmp_path / "old" / "metrics.jsonl").write_text('{"step": 1, "loss": 9.0}\n')
    return tmp_path


def test_what_cannot_be_drawn_is_a_line_each_and_the_rest_is_drawn(runs, capsys):
    arguments = ["plot", "p1", "gone", "empty", "old", "p2", "--baseline", "p2", "--x", "tokens", "-o", "x.png"]
    assert cli.main(arguments) == 0
    out, err = capsys.readouterr()
    assert err.splitlines() == [
        "mxtrain: not drawn: run folder 'gone' does not exist; name the folder of a run",
        "mxtrain: not drawn: empty/metrics.jsonl does not exist; a run creates this file at its first logged step",
        "mxtrain: not drawn: old: metrics.jsonl has no 'tokens_seen' in some rows, which --x tokens needs",
        "mxtrain: note: p2: it ends at step 2 of 9",
    ]
    header, first, second, last = out.splitlines()
    assert [line.split()[0] for line in (first, second)] == ["p2", "p1"] and last == "loss curves: x.png"
    height, width, _ = matplotlib.image.imread("x.png").shape
    assert height > 0.8 * width, "two panels"


def test_a_single_run_or_a_baseline_that_cannot_be_drawn_is_an_error(runs, capsys):
    for arguments in (["old", "--x", "time"], ["p1", "p2", "--baseline", "gone"], ["gone", "empty"]):
        assert cli.main(["plot", *arguments]) == 2
        assert capsys.readouterr().err.splitlines()[-1].startswith("mxtrain: error: ")
    assert not list(runs.glob("**/*.png"))


def test_the_picture_of_one_run_is_in_its_folder_and_that_of_several_here_or_where_o_says(runs, capsys):
    assert cli.main(["plot", "p1"]) == 0
    out = capsys.readouterr().out
    assert "6.0000" in out and "p1/loss.png" in out
    assert (runs / "p1" / "loss.png").read_bytes().startswith(b"\x89PNG") and not (runs / "loss.png").exists()
    assert cli.main(["plot", "p1", "p2"]) == 0 and (runs / "loss.png").exists()


def test_numerics_draws_one_run_over_steps(runs, capsys):
    row = {"step": 50, "numerics/layers.0.ffn_norm/rms_r2": 0.25}
    (runs / "p1" / "metrics.jsonl").write_text(json.dumps({"step": 50, "loss": 3.0}) + "\n" + json.dumps(row))
    assert cli.main(["plot", "--numerics", "p1"]) == 0
    header, worst, last = capsys.readouterr().out.splitlines()
    assert header.startswith("worst modules") and last == "numerics: p1/numerics.png"
    assert worst.split() == ["layers.0.ffn_norm", "rms_r2", "0.25", "0.25", "-"]
    assert (runs / "p1" / "numerics.png").is_file()
    for wrong in (["p1", "p2"], ["p1", "--x", "tokens"], ["p1", "--smooth", "3"], ["p1", "--baseline", "p2"]):
        assert cli.main(["plot", "--numerics", *wrong]) == 2
        assert "--numerics draws one RUN, over steps" in capsys.readouterr().err
    assert cli.main(["plot", "--numerics", "p2"]) == 2
    assert "p2/metrics.jsonl has no figures" in capsys.readouterr().err


def test_every_x_axis_is_a_choice(runs):
    for x in get_args(XAxis):
        assert cli._parser().parse_args(["plot", "p1", "--x", x]).x == x
