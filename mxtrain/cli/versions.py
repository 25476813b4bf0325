"""Versions of packages, and whether mxtrain was tested with them."""

import sys
from importlib.metadata import PackageNotFoundError, requires, version

PACKAGES = ("torch", "torchtitan", "torchao", "triton", "wandb")
_NOT_TESTED = "; not tested"


def warn_of_untested_packages() -> None:
    """Print the lines of ``mxtrain doctor`` about untested versions. A wheel cannot tie PyTorch to its TorchTitan."""
    for name in PACKAGES:
        if _NOT_TESTED in (text := package_version(name)):
            print(f"mxtrain: warning: {name} {text}", file=sys.stderr, flush=True)


def package_version(name: str) -> str:
    """Return a package's version, and what to install instead if mxtrain was not tested with it."""
    try:
        found = version(name)
    except PackageNotFoundError:
        return "not installed"
    tested = _tested()
    if name in tested and not tested[name].contains(found, prereleases=True):
        beside = "" if name == "torchtitan" else f" beside torchtitan {version('torchtitan')}"
        return f"{found}{_NOT_TESTED}{beside}: pip install '{name}{tested[name]}'"
    return f"{found}, which goes with torch{tested['torch']}" if name == "torchtitan" and "torch" in tested else found


def _tested() -> dict:
    """Package -> the versions that mxtrain was tested with beside the installed TorchTitan; empty if unknown."""
    from packaging.requirements import Requirement

    try:
        needed = [Requirement(text) for text in requires("mxtrain") or []]
        extra = "titan02" if version("torchtitan").startswith("0.2.") else "titan03"
    except PackageNotFoundError:  # no TorchTitan, or mxtrain is a checkout on PYTHONPATH
        return {}
    # An extra comes last, and says more than the dependencies.
    return {
        each.name: each.specifier for each in needed if each.marker is None or each.marker.evaluate({"extra": extra})
    }
