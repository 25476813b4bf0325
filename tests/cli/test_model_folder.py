"""The argument RUN of ``mxtrain generate`` and ``mxtrain eval``."""

import json
import shutil
import sys
from types import ModuleType

import pytest

from mxtrain import ConfigError
from mxtrain.checkpoints.manifest import MANIFEST_FILE, Manifest, write_manifest
from mxtrain.cli import model_folder as module
from mxtrain.cli.model_folder import model_folder
from mxtrain.files import hash_file
from mxtrain.hugging_face.model_config import REPORT_FILE


@pytest.fixture
def exports(monkeypatch):
    """The calls of an export that writes nothing but its report."""
    calls = []

    def export(run, target, step):
        assert not target.exists()
        calls.append(step)
        target.mkdir(parents=True)
        kept = hash_file(run / "checkpoint" / f"step-{step}" / MANIFEST_FILE).sha256
        report = {"manifest_sha256": kept, "format": "hf", "dtype": "float32", "fold_gain": False}
        (target / REPORT_FILE).write_text(json.dumps(report))

    fake = ModuleType("mxtrain.titan.hugging_face.export")
    fake.export = export
    monkeypatch.setitem(sys.modules, "mxtrain.titan.hugging_face.export", fake)
    return calls


def save_checkpoint(run, step: int, processes: int = 1, has_manifest: bool = True):
    folder = run / "checkpoint" / f"step-{step}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(b"")
    if has_manifest:
        write_manifest(folder, Manifest(step, True, {}, processes=processes))


@pytest.fixture
def run(tmp_path):
    save_checkpoint(tmp_path, 10)
    save_checkpoint(tmp_path, 20)
    (tmp_path / "config.toml").write_text("")
    return tmp_path


def test_a_model_is_taken_as_it_is(tmp_path, exports):
    (tmp_path / "config.json").write_text("{}")
    assert model_folder(tmp_path, None) == tmp_path and not exports


def test_a_run_is_exported_once_for_each_checkpoint(run, exports, capsys):
    assert model_folder(run, None) == model_folder(run, None) == run / "exported" / "step-20"
    assert model_folder(run, 10) == run / "exported" / "step-10"
    assert exports == [20, 10]
    captured = capsys.readouterr()
    assert captured.err.splitlines()[0] == f"mxtrain: exporting step 20 to {run}/exported/step-20" and not captured.out


def test_an_export_of_a_checkpoint_that_was_replaced_is_replaced(run, exports):
    model_folder(run, 20)
    save_checkpoint(run, 20, processes=2)
    assert model_folder(run, 20) == run / "exported" / "step-20"
    assert exports == [20, 20]


@pytest.mark.parametrize("damage", ["{", "{}", "[]"])
def test_an_export_without_its_checkpoints_hash_is_replaced(damage, run, exports):
    (model_folder(run, 20) / REPORT_FILE).write_text(damage)
    model_folder(run, 20)
    assert exports == [20, 20]


@pytest.mark.parametrize("change", [{"format": "mxfp8"}, {"dtype": "bfloat16"}, {"fold_gain": True}])
def test_an_export_of_another_kind_is_replaced(change, run, exports):
    report = model_folder(run, 20) / REPORT_FILE
    report.write_text(json.dumps(json.loads(report.read_text()) | change))
    model_folder(run, 20)
    assert exports == [20, 20]


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_no_export_is_not_removed(is_folder, run, exports):
    target = run / "exported" / "step-20"
    precious = target / "mine" if is_folder else target
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    with pytest.raises(ConfigError) as caught:
        model_folder(run, None)
    assert str(caught.value).startswith(f"RUN = {str(run)!r}: {target}, where its export belongs, is no export (")
    assert precious.read_text() == "precious" and not exports


def test_a_run_that_cannot_be_written_is_exported_elsewhere(run, exports, monkeypatch):
    monkeypatch.setattr(module.os, "access", lambda path, mode: path != run)
    with pytest.raises(ConfigError, match=f"write it elsewhere with 'mxtrain export {run} DIR', then give DIR as RUN$"):
        model_folder(run, None)
    assert not exports


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("checkpoint = 3", "checkpoint = 3 in {config} is not a table"),
        ("[checkpoint]\nfolder = 3", "checkpoint.folder = 3 in {config} is not a string"),
    ],
)
def test_settings_of_a_wrong_type_are_refused(text, says, run):
    config = run / "config.toml"
    config.write_text(text)
    with pytest.raises(ConfigError) as caught:
        model_folder(run, None)
    assert str(caught.value).startswith(says.format(config=config)) and "\n" not in str(caught.value)


def test_a_checkpoint_that_is_not_whole_is_passed_over(run, exports):
    save_checkpoint(run, 30, has_manifest=False)
    assert model_folder(run, None) == run / "exported" / "step-20"


def test_the_settings_name_the_folder_of_checkpoints(run, exports, monkeypatch):
    (run / "checkpoint").rename(run / "saved")
    (run / "config.toml").write_text('[checkpoint]\nfolder = "saved"\n')
    monkeypatch.setattr(module, "_export", lambda run, target, step: exports.append(step))
    model_folder(run, None)
    assert exports == [20]


@pytest.mark.parametrize("step", [15, 30])
def test_a_step_that_is_not_there_is_refused_and_its_export_stays(step, run, exports, capsys):
    save_checkpoint(run, 30)
    export = model_folder(run, 30)
    shutil.rmtree(run / "checkpoint" / "step-30")
    with pytest.raises(ConfigError, match=f"--step = {step} is not among the steps in .*: 10, 20"):
        model_folder(run, step)
    assert (export / REPORT_FILE).exists() and exports == [30] and "exporting step 15" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("make", "step", "says"),
    [
        (lambda folder: None, None, "RUN = '{folder}' does not exist"),
        (lambda folder: folder.write_text(""), None, "RUN = '{folder}' is not a folder"),
        (lambda folder: folder.mkdir(), None, "RUN = '{folder}' is neither a run (config.toml is missing) nor a"),
    ],
)
def test_other_folders_are_refused(make, step, says, tmp_path):
    folder = tmp_path / "folder"
    make(folder)
    with pytest.raises(ConfigError) as caught:
        model_folder(folder, step)
    assert str(caught.value).startswith(says.format(folder=folder))


def test_a_model_has_no_steps(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"^--step = 3: RUN = '.*' is a Hugging Face model, which has no steps"):
        model_folder(tmp_path, 3)
