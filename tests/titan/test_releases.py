"""Which releases of TorchTitan run."""

from pathlib import Path
from unittest.mock import patch

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings import read, releases
from mxtrain.settings.releases import release_of


def test_every_version_that_runs_has_a_release():
    expected = {"0.2.2": "v02", "0.2.2+cpu": "v02", "0.3.0": "v03", "0.3.1.dev20261101": "v03"}
    assert {version: release_of(version) for version in expected} == expected


@pytest.mark.parametrize("version", ["0.2.1", "0.3.0.dev1", "0.4.0", "0.4.0.dev20261101", "1.0"])
def test_another_version_is_refused(version):
    with pytest.raises(ConfigError, match=f"^torchtitan = '{version}' is not a .*; install 0.2.2 or 0.3$"):
        release_of(version)


def test_torchtitans_main_is_no_022(tmp_path):
    with patch.object(releases, "version", return_value="0.2.2"), patch.object(releases, "package_folder") as folder:
        folder.return_value = tmp_path
        assert releases.is_main.__wrapped__()
        (tmp_path / "config").mkdir()
        Path(tmp_path, "config/job_config.py").touch()
        assert not releases.is_main.__wrapped__()


def test_mxtrains_trainer_refuses_torchtitans_main():
    with patch.object(read, "is_main", return_value=True):
        with pytest.raises(ConfigError, match="^torchtitan: its main works with its own trainer only; install"):
            read.read_settings([])
