from pathlib import Path

import pytest

from mxtrain.analysis import report
from mxtrain.cli import report_command
from mxtrain.run_folder.comparison import PairedRun, write_comparison


@pytest.mark.parametrize("is_comparison", [True, False])
def test_the_report_goes_into_the_folder_of_a_comparison_only(tmp_path, monkeypatch, is_comparison):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "FIGURES", {})  # drawing is slow, and tested elsewhere
    folder = Path("runs")
    (folder / "a").mkdir(parents=True)
    rows = '{"step": 5, "loss": 3.0}\n{"step": 1, "validation_loss": 4.0}\n'
    (folder / "a" / "metrics.jsonl").write_text(rows)
    if is_comparison:
        write_comparison(folder, {"a": PairedRun("a", "a", ["a.toml"], "")})
    printed = report_command.write([folder])
    written, other = (folder, Path("report")) if is_comparison else (Path("report"), folder)
    assert printed.endswith(f"report: {written}/report.html and {written}/report.md")
    assert not (other / "report.md").exists()
    text = (written / "report.md").read_text()
    assert "| 4.0000 (step 1) | 3.0000 |" in text and "the last common validation was after step 1 of 5" in text
