"""What a run says about its start, and the settings in its folder."""

from pathlib import Path

import pytest
import tomli
import tomli_w

from mxtrain.checkpoints.manifest import Manifest, write_manifest
from mxtrain.checkpoints.start import Start
from mxtrain.titan.parse import parse_job_config
from mxtrain.titan.run_start import other_versions, write_resolved_config


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


@pytest.mark.parametrize("named", ["run", "{tmp}/run", "link", "other", "gone", "", None])
def test_a_config_that_names_its_own_folder_goes_on_to_do_so(tmp_path, monkeypatch, named):
    monkeypatch.chdir(tmp_path)
    for folder in ("run", "other"):
        Path(folder).mkdir()
    Path("link").symlink_to("run")
    named = named and named.format(tmp=tmp_path)
    job = {} if named is None else {"dump_folder": named}
    Path("run/config.toml").write_text(tomli_w.dumps({"job": job, "debug": {"seed": 3}}))
    write_resolved_config(parse_job_config(["--job.config_file=run/config.toml", "--job.dump_folder=run"]))
    kept = job if named in ("run", f"{tmp_path}/run", "link") else {}
    expected = {"debug": {"seed": 3}} | ({"job": kept} if kept else {})
    assert tomli.loads(Path("run/config.toml").read_text()) == expected
