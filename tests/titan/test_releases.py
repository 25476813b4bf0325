"""Which releases of TorchTitan run."""

from pathlib import Path
from unittest.mock import patch

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings import releases, titan
from mxtrain.settings.releases import release_of
from mxtrain.titan.releases import engine


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
        assert releases.release_name.__wrapped__() == "v03"
        (tmp_path / "config").mkdir()
        Path(tmp_path, "config/job_config.py").touch()
        assert releases.release_name.__wrapped__() == "v02"


def test_an_import_that_torchtitan_lacks_is_one_line():
    error = ModuleNotFoundError("No module named 'torchtitan.gone'", name="torchtitan.gone")
    with patch("mxtrain.titan.releases.import_module", side_effect=error):
        with pytest.raises(
            ConfigError, match="^the TorchTitan in .* lacks what .*: No module named 'torchtitan.gone'; "
        ):
            engine()
    with patch("mxtrain.titan.releases.import_module", side_effect=ImportError("other", name="torch")):
        with pytest.raises(ImportError, match="other"):
            engine()


def test_settings_that_torchtitan_lacks_are_one_line(tmp_path):
    titan.require_all_fields()
    with patch.object(titan, "package_folder", return_value=tmp_path):
        with patch.object(titan, "titan_fields", titan.titan_fields.__wrapped__):
            with pytest.raises(ConfigError, match="^the TorchTitan in .* lacks .*, training.seq_len, .* 0.3$"):
                titan.require_all_fields()
