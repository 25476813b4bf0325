import math
import re

import pytest

from mxtrain.analysis import load_run
from mxtrain.analysis.comparison import compare
from mxtrain.analysis.report import losses_table, report, write_report
from mxtrain.analysis.results import Result, result_of
from mxtrain.errors import ConfigError
from tests.support.paired_runs import make_run


@pytest.fixture
def groups(tmp_path):
    results = []
    for lr in (1e-3, 3e-3):
        for seed in (0, 1):
            for shift, name in enumerate(("mx|linear", "<p2>")):
                losses = [5.0 - 0.1 * step + 0.01 * shift * (seed + 1) for step in range(30)]
                run = make_run(tmp_path / f"{shift}{seed}{lr}", losses, seed, lr, {30: losses[-1]})
                results.append(result_of(load_run(run), name))
    results.append(Result("diverged", "<p2>", 1e-3, 2, 30, math.nan, "tiny", 1920, problem="its loss is not finite"))
    return compare(results[:-1])


def test_the_table_has_means_errors_and_intervals(groups):
    (group,) = groups
    _, first, second, *_ = losses_table(group)
    assert first[:5] == ("mx|linear", "0.001", "2", "2.1000 (0.0000)", "baseline")
    # Differences 0.01 and 0.02: mean 0.015, standard error 0.005, 12.706 of them on either side.
    assert second[:5] == ("<p2>", "0.001", "2", "2.1150 (0.0050)", "+0.0150 [-0.0485, +0.0785] (2 pairs)")
    assert second[7:] == ("0", "100", "1.50")


def test_the_report_is_markdown_with_figures_and_one_html_file_without_other_files(groups, tmp_path):
    folder = tmp_path / "out" / "report"
    markdown, page = write_report(folder, report("a & b", groups, ["gone does not exist"]))
    text = markdown.read_text()
    assert "# a & b\n" in text and "- gone does not exist" in text and r"| mx\|linear | 0.001 | 2 |" in text
    files = ["differences.svg", "curves.svg", "learning_rates.svg"]
    assert re.findall(r"\]\((\w+\.svg)\)", text) == files
    assert text.index("](differences.svg)") < text.index("| variant |"), "the result comes first"
    html = page.read_text()
    assert "<h1>a &amp; b</h1>" in html and "&lt;p2&gt;" in html and "<p2>" not in html
    assert re.findall(r'src="(.{10})', html) == ["data:image"] * 3 and "href" not in html
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    write_report(folder, report("a & b", groups, ["gone does not exist"]))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before, "equal reports are equal files"


def test_figures_show_names_as_they_are(tmp_path):
    """Matplotlib reads $...$ as math, and hides labels that begin with an underscore."""
    results = [
        result_of(load_run(make_run(tmp_path / f"{i}{lr}", [3.0, 2.0], 0, lr, {2: 2.0})), name)
        for i, name in enumerate(("_a", "lr$x^$"))
        for lr in (1e-3, 3e-3)
    ]
    write_report(tmp_path / "report", report("t", compare(results), []))
    for name, title in (("curves", "> _a</text>"), ("learning_rates", "> _a</text>"), ("differences", "that of _a: ")):
        svg = (tmp_path / "report" / f"{name}.svg").read_text()
        assert title in svg and ">lr$x^$</text>" in svg


def test_one_rate_without_curves_has_one_figure_and_one_seed_no_interval():
    rows = [Result(name, name, 1e-3, 0, 10, 2.0 + shift, "tiny") for shift, name in enumerate("ab")]
    (group,) = compare(rows)
    (_, a, b) = losses_table(group)
    assert a[3:7] == ("-", "-", "2.0000", "baseline") and b[3:7] == ("-", "-", "3.0000", "+1.0000 (one pair)")
    assert set(report("t", [group], [])) == {"differences.svg", "report.md", "report.html"}


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="the report in .*file.* cannot be written"):
        write_report(tmp_path / "file", report("t", compare([Result("a", "a", 1e-3, 0, 10, 2.0)]), []))
