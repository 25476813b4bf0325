"""``mxtrain generate`` and ``mxtrain eval`` on a run: exported once, and again after its checkpoint has changed."""

import json
import shutil

import pytest

from mxtrain import cli
from mxtrain.files import hash_file
from mxtrain.hugging_face.model_config import REPORT_FILE
from tests.support import saved_runs


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run with text, a tokenizer and a checkpoint."""
    saved_runs.add_flavors(monkeypatch)
    (tmp_path / "text").mkdir()
    for i in range(8):
        (tmp_path / "text" / f"{i}.txt").write_text(f"def main{i}(a, b):\n    return a + b * {i}\n" * 12)
    return saved_runs.save_run(tmp_path / "run", "llama3", "small", text=tmp_path / "text")


def test_a_run_is_exported_when_its_checkpoint_is_new(run, capfd):
    def figures() -> tuple[str, bool]:
        capfd.readouterr()
        assert cli.main(["eval", str(run), str(run.parent / "text" / "0.txt"), "--max-tokens", "50"]) == 0
        captured = capfd.readouterr()
        return captured.out, "exporting step 3" in captured.err

    first, was_exported = figures()
    assert was_exported and "bits/byte" in first
    assert figures() == (first, False)
    assert cli.main(["generate", str(run), "def main", "--greedy", "--max-new-tokens", "3"]) == 0
    captured = capfd.readouterr()
    assert captured.out.startswith("def main") and captured.err == ""

    checkpoint = run / "checkpoint" / "step-3"
    shutil.rmtree(checkpoint)
    saved_runs.save_weights(checkpoint, saved_runs.random_weights("llama3", "small", seed=7))
    second, was_exported = figures()
    assert was_exported and second != first


def test_the_report_of_an_export_names_its_checkpoint(run, tmp_path):
    assert cli.main(["export", str(run), str(tmp_path / "out"), "--loss-tokens", "0"]) == 0
    kept = json.loads((tmp_path / "out" / REPORT_FILE).read_text())["manifest_sha256"]
    assert kept == hash_file(run / "checkpoint" / "step-3" / "manifest.json").sha256
