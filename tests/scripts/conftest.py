"""Shared fixtures of the tests of scripts."""

import importlib
import sys
from pathlib import Path

import pytest

from mxtrain.titan.releases import RELEASE

# The ablations are for TorchTitan 0.2.2.
_OF_022 = ["test_norm_gradients.py", "test_rms_ablations.py"]
collect_ignore = [] if RELEASE == "v02" else _OF_022
EVIDENCE = Path(__file__).parents[2] / "scripts" / "evidence"


@pytest.fixture(scope="module")
def import_evidence():
    """Import a module of scripts/evidence, whose converters TorchTitan knows as long as the tests of a file run."""
    from torchtitan.protocols import model_converter

    converters = dict(model_converter._registry_model_converter_cls)
    sys.path.insert(0, str(EVIDENCE))
    yield importlib.import_module
    sys.path.remove(str(EVIDENCE))
    for file in EVIDENCE.glob("*.py"):
        sys.modules.pop(file.stem, None)
    model_converter._registry_model_converter_cls.clear()
    model_converter._registry_model_converter_cls.update(converters)
