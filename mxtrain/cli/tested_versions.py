"""Which versions of packages mxtrain was tested with: those that its installation allows."""

from importlib.metadata import PackageNotFoundError, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

WHY_EXACT = {"torchtitan": "its trainer and settings are extended, and other releases, such as 0.3, have other ones"}
"""Why a package has one version only"""


def untested(name: str, version: str) -> str:
    """Return what is wrong with a package's ``version`` and what to do; "" if it is among the tested ones."""
    tested = _tested_versions().get(canonicalize_name(name))
    if tested is None or tested.contains(version, prereleases=True):
        return ""
    why = f" ({WHY_EXACT[name]})" if name in WHY_EXACT else ""
    return f"not tested: mxtrain was tested with {tested}{why}; pip install '{name}{tested}'"


def _tested_versions() -> dict:
    try:
        found = [Requirement(text) for text in requires("mxtrain") or []]
    except PackageNotFoundError:  # a checkout on PYTHONPATH that was never installed
        return {}
    return {canonicalize_name(each.name): each.specifier for each in found if each.specifier}
