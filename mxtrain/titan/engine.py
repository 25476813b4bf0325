"""What depends on the installed release of TorchTitan: ``v02`` for 0.2.2, ``v03`` for 0.3.0.

Their files ``engine.py`` have the same names, which are all that the rest of ``mxtrain`` uses of a release.
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from packaging.specifiers import SpecifierSet

from mxtrain.errors import ConfigError

VERSIONS = {"v02": ">=0.2.2,<0.3", "v03": ">=0.3,<0.4"}


def release_of(found: str) -> str:
    """Return the release among VERSIONS that a version of TorchTitan belongs to. Raises ConfigError if none fits."""
    for release, versions in VERSIONS.items():
        if SpecifierSet(versions).contains(found, prereleases=True):
            return release
    raise ConfigError(f"torchtitan = {found!r} is not a version that mxtrain runs: allowed are 0.2.2 and 0.3")


RELEASE = release_of(version("torchtitan"))


def engine() -> ModuleType:
    """The engine of the installed release. It is imported here and not above, because engines import this package."""
    return import_module(f"mxtrain.titan.{RELEASE}.engine")
