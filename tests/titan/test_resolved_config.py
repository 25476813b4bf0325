"""The settings in a run's folder."""

from pathlib import Path

import pytest
import tomli
import tomli_w

from mxtrain.titan.parse import parse_job_config
from mxtrain.titan.resolved_config import write_resolved_config


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
