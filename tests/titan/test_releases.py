"""Which releases of TorchTitan run."""

import pytest

from mxtrain.errors import ConfigError
from mxtrain.settings.releases import release_of


def test_every_version_that_runs_has_a_release():
    expected = {"0.2.2": "v02", "0.2.2+cpu": "v02", "0.3.0": "v03", "0.3.1.dev20261101": "v03"}
    assert {version: release_of(version) for version in expected} == expected


@pytest.mark.parametrize("version", ["0.2.1", "0.3.0.dev1", "0.4.0", "0.4.0.dev20261101", "1.0"])
def test_another_version_is_refused(version):
    with pytest.raises(ConfigError, match=f"^torchtitan = '{version}' is not a .*; install 0.2.2 or 0.3$"):
        release_of(version)
