"""``mxtrain rehearse`` from a checkpoint to a TOML that training takes; mistakes are one line."""

import csv

import pytest
import tomli

from mxtrain import cli
from mxtrain.config import dump_config
from mxtrain.titan.job_config import parse_job_config
from mxtrain.titan.rehearse import candidates
from tests.support import saved_runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    saved_runs.add_flavors(monkeypatch)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("".join(f"line {i} of a text\n" for i in range(3000)))
    data = {"vocab_size": saved_runs.VOCABULARY}
    return saved_runs.save_run(tmp_path / "run", "llama3", "small", text=tmp_path / "text", data=data)


def test_a_checkpoint(run, tmp_path, capsys):
    assert cli.main(["rehearse", str(run), "--bound", "0.045"]) == 0
    lines = capsys.readouterr().out
    assert "step 3" in lines and all(f"\n{spec} " in lines for spec in candidates())
    rows = list(csv.DictReader((run / "rehearsal" / "errors.csv").open()))
    assert len({row["layer"] for row in rows}) * len(candidates()) == len(rows)
    assert all(0 < float(row[gemm]) < 0.5 for row in rows for gemm in ("fprop", "dgrad", "wgrad"))
    again = ["rehearse", str(run), "-o", str(tmp_path / "again")]
    assert cli.main(again) == 0  # stochastic rounding repeats its bits
    assert (tmp_path / "again" / "errors.csv").read_text() == (run / "rehearsal" / "errors.csv").read_text()
    own = tomli.loads((run / "rehearsal" / "recipes.toml").read_text())["mxnorm"]
    assert own["recipe"] == "mxfp8"
    dump_config({"extends": str(run / "config.toml"), "mxnorm": own}, tmp_path / "next.toml")
    assert parse_job_config([f"--job.config_file={tmp_path / 'next.toml'}"]).mxnorm.recipes == own["recipes"]
    cli.main(["rehearse", str(run / "config.toml"), "-o", str(tmp_path / "new")])
    assert "a new model" in capsys.readouterr().out
    assert (tmp_path / "new" / "errors.csv").read_text() != (run / "rehearsal" / "errors.csv").read_text()


@pytest.mark.parametrize(
    "words, message",
    [
        (["--bound", "5"], "--bound = 5.0 is not between 0 and 1"),
        (["--step", "7"], "--step = 7 is not among the steps"),
    ],
)
def test_mistakes(run, words, message, capsys):
    assert cli.main(["rehearse", str(run), *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
