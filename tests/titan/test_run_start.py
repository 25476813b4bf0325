"""What a run says about its start."""

from mxtrain.run_folder.manifest import Manifest, write_manifest
from mxtrain.run_folder.start import Start
from mxtrain.titan.run_start import excluded_parts, other_versions


def test_versions_that_have_changed_are_named(tmp_path, monkeypatch):
    checkpoint = tmp_path / "step-5"
    checkpoint.mkdir()
    write_manifest(checkpoint, Manifest(5, True, {}, versions={"torch": "2.11.0", "triton": None, "gone": "1"}))
    versions = {"torch": "2.13.0", "triton": None, "new": "1"}
    monkeypatch.setattr("mxtrain.titan.run_start.package_versions", lambda: versions)
    assert other_versions(Start(5, (), checkpoint)) == [
        "since this checkpoint versions have changed: torch 2.11.0 to 2.13.0"
    ]
    versions = {"torch": "2.11.0"}
    assert other_versions(Start(5, (), checkpoint)) == other_versions(Start(0)) == []


def test_what_a_resumed_run_leaves_out_of_its_checkpoint_is_said():
    assert excluded_parts(Start(12), ["model", "dataloader"]) == [
        "checkpoint.exclude_from_loading: step 13 begins without the checkpoint's model and dataloader"
    ]
    assert excluded_parts(Start(12), []) == excluded_parts(Start(0), ["model"]) == []
