"""What depends on the installed release of TorchTitan: ``v02`` for 0.2.2, ``v03`` for 0.3.0.

Their files ``engine.py`` have the same names, which are all that the rest of ``mxtrain`` uses of a release.
"""

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

RELEASE = "v02" if version("torchtitan").startswith("0.2.") else "v03"


def engine() -> ModuleType:
    """The engine of the installed release. It is imported here and not above, because engines import this package."""
    return import_module(f"mxtrain.titan.{RELEASE}.engine")
